"""The server of a deployment: `lightning-fcl fit` of the recipe, whose rounds come from nodes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np

from lightning_fcl.data.scenarios import EMPTY, ClassIncremental, DomainIncremental, Plan, Pool
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.deployment.link import Link
from lightning_fcl.deployment.nodes import Nodes, Terms, deploy
from lightning_fcl.deployment.own_data import OwnData, read_data
from lightning_fcl.deployment.recipe import fingerprint, read_recipe
from lightning_fcl.hub.checkpoint import newest_checkpoint
from lightning_fcl.running.fit import FederatedCLI, run

log = logging.getLogger(__name__)


def serve(
    recipe: Path, link: Link, out: Path, terms: Terms, data: str | None = None, clients: Sequence[str] = ()
) -> FederatedCLI:
    """Run a deployment's server to its end, from the newest checkpoint in its folder, if there is one.

    Args:
        data: What it tests on: see `read_data`; None: the recipe's own data, of which clients' samples are not used.
    """
    if data is not None and not clients:
        raise ValueError(
            "Expected the names of the `clients` beside `data` of the server, which do not tell them, but got none. "
            'Set both in the run\'s configuration: clients="a,b,c".'
        )

    class Served(FederatedCLI):
        """A fit whose clients are nodes."""

        program = "lightning-fcl"

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": FederatedCLI.subcommands()["fit"]}

        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            nodes = Nodes(link, fingerprint(read_recipe(recipe)), terms)
            deploy(trainer, trainer.strategy, nodes)  # type: ignore[arg-type]
            return trainer

        def fit(self, model: L.LightningModule, **arguments: Any) -> None:
            if data is not None:
                take_server_data(self.datamodule, read_data(data), clients)
            super().fit(model, **arguments)

    warnings.filterwarnings("ignore", "`training_step` returned `None`")  # nodes train
    newest = newest_checkpoint(out / "checkpoints")
    going_on = ["--ckpt_path", str(newest)] if newest is not None else []
    if newest is not None:
        log.info("Goes on from %s.", newest)
    quiet = ["--trainer.enable_progress_bar", "false"]
    return run(["fit", "--config", str(recipe), "--out", str(out), *quiet, *going_on], Served)


def take_server_data(stream: FederatedStream, data: OwnData, clients: Sequence[str]) -> None:
    """Let a stream be that of a server, which has samples to test on, and knows the clients' names alone."""
    scenario, samples = stream.scenario, data.samples
    if not isinstance(scenario, ClassIncremental | DomainIncremental):
        raise ValueError(
            f"Expected a scenario of classes or domains for a server with data of its own but got {scenario}, which "
            "deals samples out one by one. Leave the server's `data` out: it then takes the recipe's."
        )
    stream.plan = pattern(scenario, data, clients, stream.seed)
    data.lend_hooks(stream)
    stream.hold(samples)


def pattern(scenario: ClassIncremental | DomainIncremental, data: OwnData, clients: Sequence[str], seed: int) -> Plan:
    """A plan in which clients have tasks and no samples."""
    samples = data.samples
    named = np.zeros(len(samples), dtype=np.int64) if samples.group is None else samples.group
    domains, group = np.unique(named, return_inverse=True)
    number = max(len(samples.classes), len(domains), 1)
    each = np.arange(number)
    y = np.concatenate([each % max(len(samples.classes), 1), samples.labels])
    of_all = None if samples.group is None else np.concatenate([each % len(domains), group])
    names = () if samples.group is None else tuple(map(str, domains))
    part = data.part if data.part is not None else np.full(len(samples), "test")
    test, validation = (np.flatnonzero(part == name) + number for name in ("test", "validation"))
    pool = Pool(y, EMPTY, test, validation, dict.fromkeys(clients, each), of_all, samples.classes, names)
    plan = replace(scenario, samples_per_round=None).plan(pool, seed)
    return replace(
        plan,
        train=tuple(dict.fromkeys(clients, EMPTY) for _ in plan.train),
        groups=plan.groups[number:],
        test=plan.test - number,
        validation=plan.validation - number,
    )
