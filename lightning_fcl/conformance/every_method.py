"""What holds of every method, whatever it does."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl.conformance.trial import NotTriedError, assert_same, make, rules_for, states, task_of, train
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.methods.method import Method


@states("Method", "its draws come from the stream's seed alone, not from global generators")
def _(kind: type[Method]) -> None:
    outcomes = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            outcomes.append(train([make(kind)]))
    assert_same(outcomes[1], outcomes[0], "after global generators of another seed", tolerance=0)


@states("Method", "clients that train side by side come to what they come to one at a time")
def _(kind: type[Method]) -> None:
    if not kind.vectorizable:
        raise NotTriedError("it says that clients who use it do not train side by side")
    alone, together = (train([make(kind)], cohort_size=size, precision="32-true") for size in (1, 3))
    assert_same(together, alone, "side by side, in single precision", tolerance=1e-4)


@states("Method", "a fit that is stopped and goes on comes to the bits of one that is not")
def _(kind: type[Method]) -> None:
    whole = train([make(kind)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stopped.ckpt"
        train([make(kind)], callbacks=[_SaveAfter(path)], max_epochs=2)
        try:
            continued = train([make(kind)], ckpt_path=str(path))
        except NotTriedError as reason:
            raise AssertionError(f"stopped after round 2 it cannot go on: {reason}") from reason
    assert_same(continued, whole, "stopped after round 2 and continued", tolerance=0)


@states("Method", "who does not use it trains as without it, to the bit")
def _(kind: type[Method]) -> None:
    unused = make(kind, clients=[])
    assert_same(train([unused]), train([], reductions=rules_for(unused)), "with `clients=[]`", tolerance=0)


@states("Method", "what clients keep on disk comes back to the bit")
def _(kind: type[Method]) -> None:
    assert_same(train([make(kind)], client_store="disk"), train([make(kind)]), "from disk", tolerance=0)


@states("Method", "what clients and the server keep is finite")
def _(kind: type[Method]) -> None:
    train([make(kind)], callbacks=[_LooksForNaN()])


@states("Method", "it leaves the module as it was: no hooks, and the same parameters may learn")
def _(kind: type[Method]) -> None:
    before, task = task_of(), train([make(kind)])
    for name, part in task.named_modules():
        hooks = [*part._forward_hooks, *part._forward_pre_hooks, *part._backward_hooks]
        if hooks:
            raise AssertionError(f"{len(hooks)} hooks are left on `{name}`")
    for (name, found), wanted in zip(task.named_parameters(), before.parameters(), strict=True):
        if found.requires_grad != wanted.requires_grad:
            raise AssertionError(f"`{name}.requires_grad` is {found.requires_grad} afterwards")


class _SaveAfter(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class _LooksForNaN(Callback):
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        server = need_federation(trainer, "a statement", "it has no clients").server
        kept = {client: server.store[client] for client in server.store} | {"the server": {"state": server.state}}
        for who, sections in kept.items():
            for section, memory in sections.items():
                for name, value in memory.items():
                    if not value.isfinite().all():
                        raise AssertionError(f"`{section}.{name}` of {who} is not finite")
