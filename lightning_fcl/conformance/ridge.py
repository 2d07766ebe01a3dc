"""What holds of classifiers that are solved for, not trained: they are those of all samples in one place."""

from __future__ import annotations

from lightning_fcl.conformance.statement import states
from lightning_fcl.conformance.trial import assert_close, make, stream_of, task_of, train
from lightning_fcl.methods.method import Method


@states("Fed3R", "however the samples are spread over clients, the classifier is the same")
def _(kind: type[Method]) -> None:
    heads = []
    for clients in (1, 3, 8):
        task = train([make(kind)], stream_of(clients, tasks=1, rounds=1), task_of(rate=0.0))
        heads.append({name: value for name, value in task.state_dict().items() if ".head." in name})
    for other in heads[1:]:
        assert_close(other, heads[0], "of other clients", 1e-7)
