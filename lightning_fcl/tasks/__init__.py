"""LightningModules that a federation trains one client at a time or vectorised: a network with a loss and metrics.

What never belongs here: rounds, clients and methods; each also works in a plain Trainer.
"""
