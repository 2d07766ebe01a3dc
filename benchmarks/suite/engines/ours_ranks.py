"""This library with two processes (ranks): `Trainer(strategy=FederatedStrategy(...), devices=2)`."""

from suite.engines import ours

NAME = "ours, two ranks"


def refuses(workload):
    """Return None, because the engine supports every workload."""
    return None


def run(workload, rounds, marks, out, device="cpu"):
    """Run one `Trainer.fit` with two ranks."""
    ours.DEVICES = 2
    ours.run(workload, rounds, marks, out, device)
