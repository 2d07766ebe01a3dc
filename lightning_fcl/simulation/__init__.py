"""Simulation of a federation in one Trainer: the strategy "federated" and the steps of a round.

This package must not depend on a specific method, task or model. The protocols and settings that methods, tasks and
models use are in the package `federation`.
"""
