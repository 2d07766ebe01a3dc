"""The server side of a federation: aggregation, encoding of uploads, client sampling and client states.

Trainers and module classes do not belong in this package. It works on states, which map entry names to tensors.
"""
