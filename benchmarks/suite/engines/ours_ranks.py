"""This library with two processes (ranks): `Trainer(strategy=FederatedStrategy(...), devices=2)`."""

from suite.engines import ours

NAME = "ours, two ranks"


def refuses(workload):
    """Return None, because the engine supports every workload."""
    return None


def run(workload, rounds, marks, out, device="cpu"):
    """Train with one `Trainer.fit` on two ranks, mark each round, and write the server's last state."""
    ours.DEVICES = 2
    ours.run(workload, rounds, marks, out, device)
