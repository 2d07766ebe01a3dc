"""`Trainer(strategy="federated", devices=2)`: two ranks."""

from suite.engines import ours

NAME = "ours, two ranks"


def refuses(workload):
    """It trains everything."""
    return None


def run(workload, rounds, marks, out, device="cpu"):
    """One `Trainer.fit`."""
    ours.DEVICES = 2
    ours.run(workload, rounds, marks, out, device)
