"""Simulation of a federation in one Trainer: the strategy "federated" and the steps of a round.

This package must not depend on a specific method, task or model. They declare what they need in `federation`.
"""
