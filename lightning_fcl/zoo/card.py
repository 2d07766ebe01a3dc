"""The card of a published network: what people and the Hugging Face hub read."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_fcl.evaluation.table import metric_number, metric_title
from lightning_fcl.zoo.entry import Entry

ENERGY = "energy_mj/learnt sample"
"""What learning a sample costs the device of `lightning-fcl device-report`, in mJ."""


def card(entry: Entry, spread: dict[str, tuple[float, float, int]], numbers: int) -> str:
    """The text of an entry's ``README.md``, with the metadata that the hub reads.

    Args:
        spread: Mean, standard deviation and number of seeds of the recipe's committed table, by metric.
    """
    lines = ["---", yaml.safe_dump(_metadata(entry), sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [f"# {entry.name}", "", entry.about or "A network trained by lightning-fcl.", ""]
    lines += ["```python", "from lightning_fcl import zoo", "", f'model = zoo.load("{entry.full_name}")']
    lines += ["model.predict(x)  # class names and probabilities" if entry.classes else "model.embed(x)  # features"]
    lines += ["```", "", "## What it takes and gives", ""]
    sample = entry.measurement.describe() if entry.measurement else f"samples of shape {tuple(entry.shape)}, prepared"
    lines += [f"- **Takes** {sample}.", f"- **Gives** {_gives(entry)}."]
    lines += [f"- **Network** `{entry.network['class_path'].rpartition('.')[2]}`, {numbers:,} numbers in its state."]
    lines += [f"- **Stored** as {entry.stored}.", ""]
    if entry.metrics:
        lines += ["## Its numbers", "", *_table(entry, spread), ""]
    if ENERGY in entry.metrics:
        lines += [
            "The energy is estimated by the rules of `lightning-fcl device-report`, with what is frozen in int8.",
            "",
        ]
    lines += ["## How it came about", "", *_origin(entry), ""]
    ends = [f"It cannot go on learning: {why}."] if (why := entry.recipe.get("ends")) else []
    nothing = "Nothing of a single client is in its files: no memory, no head of its own, no sample."
    limits = [*entry.limits, *ends, nothing]
    lines += ["## Limits", "", *[f"- {limit}" for limit in limits], ""]
    lines += ["## Licence", "", *[f"- {of}: {terms}" for of, terms in entry.licence.items()], ""]
    return "\n".join(lines)


def _metadata(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "library_name": "lightning-fcl",
        "tags": ["federated-learning", "continual-learning", "pytorch"],
    }
    if "weights" in entry.licence:
        found |= {"license": "other", "license_name": entry.licence["weights"]}
    if "test_accuracy" in entry.metrics:
        metric: dict[str, Any] = {"type": "accuracy", "value": round(entry.metrics["test_accuracy"], 4)}
        data = entry.name.split(".")[1] if "." in entry.name else "own"
        result: dict[str, Any] = {
            "task": {"type": "other"},
            "dataset": {"name": data, "type": data},
            "metrics": [metric],
        }
        found["model-index"] = [{"name": entry.name, "results": [result]}]
    return found


def _gives(entry: Entry) -> str:
    if not entry.classes:
        return "features (`embed`), without a head: heads stay with the clients that trained them"
    shown = ", ".join(entry.classes[:12]) + (", ..." if len(entry.classes) > 12 else "")
    how = "" if entry.outputs == "logits" else ", by least squares: probabilities are its outputs, cut at 0 and scaled"
    return f"{len(entry.classes)} classes: {shown}{how}"


def _table(entry: Entry, spread: dict[str, tuple[float, float, int]]) -> list[str]:
    lines = ["| | this network | over seeds | paper |", "| --- | ---: | ---: | ---: |"]
    for name in dict.fromkeys([*entry.metrics, *spread]):
        if name.startswith("paper/"):
            continue
        own = metric_number(name, entry.metrics[name]) if name in entry.metrics else ""
        if name in spread:
            mean, std, number = spread[name]
            over = f"{metric_number(name, mean)} ± {metric_number(name, std)} ({number})"
        else:
            over = ""
        paper = entry.metrics.get(f"paper/{name}")
        told = metric_number(name, paper) if paper is not None else ""
        lines.append(f"| {metric_title(name)} | {own} | {over} | {told} |")
    return lines


def _origin(entry: Entry) -> list[str]:
    recipe = entry.recipe
    lines = []
    if configs := recipe.get("configs"):
        words = [f"--config recipes/{config}" for config in configs]
        words += [word if word.startswith("--") else f"'{word}'" for word in recipe["words"]]
        lines += ["```bash", f"lightning-fcl fit {' '.join(words)} --seed_everything {recipe['seed']}", "```", ""]
    elif command := recipe.get("command"):
        lines += ["```bash", command, "```", ""]
    made = ", ".join(f"{name} {version}" for name, version in entry.made_with.items() if name != "machine")
    lines.append(f"Trained with {made}, on {entry.made_with.get('machine', 'a machine that it does not tell')}.")
    return lines
