"""The card of a published network: what people and the Hugging Face hub read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from lightning_fcl.errors import require
from lightning_fcl.evaluation.table import metric_number, metric_title
from lightning_fcl.zoo.entry import Entry

ENERGY = "energy_mj/learnt sample"
"""What learning a sample costs the device of `lightning-fcl device-report`, in mJ."""


def card(entry: Entry, spread: Mapping[str, tuple[float, float, int]], state: Mapping[str, Tensor]) -> str:
    """The text of an entry's ``README.md``, with the metadata that the hub reads.

    Args:
        spread: Mean, standard deviation and number of seeds of the recipe's committed table, by metric.
    """
    jinja2 = require("jinja2", "writes cards")
    template = jinja2.Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    text: str = template.render(
        entry=entry,
        metadata=yaml.safe_dump(_metadata(entry), sort_keys=False, allow_unicode=True).strip(),
        shape=tuple(entry.shape),
        numbers=sum(value.numel() for value in state.values()),
        rows=_rows(entry, spread),
        energy=ENERGY,
        command=_command(entry.recipe),
        packages=[f"{name} {version}" for name, version in entry.made_with.items() if name != "machine"],
    )
    return text.rstrip("\n") + "\n"


def _metadata(entry: Entry) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "library_name": "lightning-fcl",
        "tags": ["federated-learning", "continual-learning", "pytorch"],
    }
    if "weights" in entry.licence:
        metadata |= {"license": "other", "license_name": entry.licence["weights"]}
    if "test_accuracy" in entry.metrics:
        data = entry.name.split(".")[1] if "." in entry.name else "own"
        result = {
            "task": {"type": "other"},
            "dataset": {"name": data, "type": data},
            "metrics": [{"type": "accuracy", "value": round(entry.metrics["test_accuracy"], 4)}],
        }
        metadata["model-index"] = [{"name": entry.name, "results": [result]}]
    return metadata


def _rows(entry: Entry, spread: Mapping[str, tuple[float, float, int]]) -> list[list[str]]:
    """For each metric its title, the network's own number, that over seeds, and the paper's."""
    rows = []
    for name in dict.fromkeys([*entry.metrics, *spread]):
        if name.startswith("paper/"):
            continue
        own, paper = (
            "" if value is None else metric_number(name, value)
            for value in (entry.metrics.get(name), entry.metrics.get(f"paper/{name}"))
        )
        mean, std, number = spread.get(name, (0.0, 0.0, 0))
        over = f"{metric_number(name, mean)} ± {metric_number(name, std)} ({number})" if number else ""
        rows.append([metric_title(name), own, over, paper])
    return rows


def _command(recipe: Mapping[str, Any]) -> str:
    if not recipe.get("configs"):
        return str(recipe.get("command", ""))
    words = [f"--config recipes/{config}" for config in recipe["configs"]]
    words += [word if word.startswith("--") else f"'{word}'" for word in recipe["words"]]
    return f"lightning-fcl fit {' '.join(words)} --seed_everything {recipe['seed']}"
