"""What a recipe stands for, built without a Trainer: for reports and exports."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fcl.cli.run import resolve
from lightning_fcl.data.stream import FederatedStream


@dataclass(frozen=True)
class Setting:
    """What a recipe says of a federation.

    Args:
        module: The model.
        reductions: Those of the strategy.
        local_epochs: Local epochs of a round.
        stream: Where the data come from; nothing is loaded yet.
        participation: Share or number of clients per round.
        callbacks: What the recipe says of its callbacks: ``class_path`` and ``init_args``.
    """

    module: L.LightningModule
    reductions: dict[str, str]
    local_epochs: int
    stream: FederatedStream
    participation: int | float
    callbacks: list[dict[str, Any]] = field(default_factory=list)


def read_setting(recipes: Sequence[str | Path]) -> Setting:
    """Build what recipes stand for, later ones over earlier ones, without a Trainer.

    Raises:
        ValueError: If a recipe is not understood, or has no model.
    """
    if not recipes:
        raise ValueError("Expected at least one recipe but got none. Name it, as in: device-report RECIPE.yaml")
    config = resolve(["fit", *(word for path in recipes for word in ("--config", str(path)))])
    if not config.get("model"):
        raise ValueError(f"Expected a `model` in {', '.join(map(str, recipes))} but there is none.")
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(L.LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(FederatedStream, "data")
    try:
        with warnings.catch_warnings():
            # Newer versions of jsonargparse have another name for it, which the oldest that we take lacks.
            warnings.simplefilter("ignore", DeprecationWarning)
            made = parser.instantiate_classes(parser.parse_object({name: config[name] for name in ("model", "data")}))
    except ArgumentError as error:
        raise ValueError(f"the recipe is not understood: {error}") from error
    strategy = config["trainer"]["strategy"]
    own = strategy.get("init_args", {}) if isinstance(strategy, dict) else {}
    shares = own.get("participation", 1.0)
    callbacks = config["trainer"].get("callbacks") or []
    return Setting(
        made["model"], own.get("reductions") or {}, own.get("local_epochs", 1), made["data"], shares, callbacks
    )
