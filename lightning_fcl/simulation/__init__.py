"""A federation in one Trainer: the strategy "federated", and a round's steps.

What never belongs here: knowledge of a method, a task or a model; what these may declare is in ``federation``.
"""
