"""A federation in one Trainer: the strategy "federated", a round's steps, and how a client trains, alone or stacked.

What never belongs here: knowledge of a method, a task or a model; what these may declare is in ``federation``.
"""

from lightning_fcl.door import register_strategy

register_strategy()
