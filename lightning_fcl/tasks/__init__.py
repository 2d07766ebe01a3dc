"""Tasks: LightningModules that combine a network with a loss and metrics, for sequential or vectorized training.

Tasks do not depend on rounds, clients or methods. Each task also works in a plain Trainer.
"""
