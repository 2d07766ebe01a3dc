"""Fault-injection cases with changed recipes. A recipe must run or raise one error message."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import yaml
from campaign import Campaign, Outcome, call
from hypothesis import strategies as st

from lightning_fcl.runs.paper_rows import recipes_folder


def changed_recipe(callbacks: list[dict[str, Any]], **strategy: object) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((recipes_folder() / "quickstart.yaml").read_text())
    del recipe["out"]
    recipe["trainer"] |= {"max_epochs": 2, "enable_progress_bar": False, "callbacks": callbacks}
    recipe["trainer"]["strategy"]["init_args"] = {"local_epochs": 1, **strategy}
    recipe["data"]["scenario"]["init_args"] = {"num_experiences": 2, "rounds_per_experience": 1}
    recipe["data"]["partition"]["init_args"] = {"num_clients": 3}
    return recipe


def _method(name: str, **arguments: object) -> dict[str, Any]:
    return {"class_path": f"lightning_fcl.callbacks.{name}", "init_args": arguments}


ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1}}
RECIPES = [
    changed_recipe([_method("FLwF2T", alpha=0.5, beta=0.2), _method("Replay", memory_size=50)]),
    changed_recipe([_method("EWC"), _method("FedProx", mu=0.1)], participation=0.7, client_store="disk"),
    changed_recipe([_method("GEM")], reductions={"model.3.*": "local"}),
    changed_recipe([_method("DERpp", memory_size=30)], server_optimizer=ADAM, client_weights="uniform"),
    changed_recipe([_method("ICaRL"), _method("ContinualMetrics")], max_vectorized_clients=2, seed=3),
]
MORE = (
    *("accelerator", "accumulate_grad_batches", "barebones", "batch_size", "callbacks", "check_val_every_n_epoch"),
    *("class_path", "detect_anomaly", "devices", "drop_last", "fast_dev_run", "gradient_clip_val", "init_args"),
    *("limit_train_batches", "limit_val_batches", "log_every_n_steps", "logger", "max_epochs", "max_steps", "max_time"),
    *("num_workers", "overfit_batches", "precision", "profiler", "seed", "shuffle", "split", "val_check_interval", "x"),
)
VALUES = st.one_of(
    st.sampled_from([None, True, False, math.nan, math.inf, "", "null", "1e-3", "../x", [], {}, [1], {"x": 1}]),
    st.sampled_from(["lightning_fcl.callbacks.Replay", "os.system", {"class_path": "os.system"}]),
    st.integers(-3, 30),
    st.floats(-2, 2),
    st.text(max_size=5),
).map(copy.deepcopy)  # A later mutation may change the value in place, so each mutation uses a copy.


def _places(content: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else []
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


@st.composite
def mutations(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """Return a recipe with one to three changed places, and a description of the changes."""
    recipe, said = copy.deepcopy(draw(st.sampled_from(RECIPES))), []
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(recipe))))
        parent: Any = recipe
        for key in path[:-1]:
            parent = parent[key]
        key, kind = path[-1], draw(st.sampled_from(["replace", "near", "delete", "rename", "add"]))
        old = parent[key]
        if kind == "delete":
            del parent[key]
        elif kind == "rename" and isinstance(key, str):
            parent[key[:-1] + draw(st.sampled_from(["", "s", "_"]))] = parent.pop(key)
        elif kind == "add" and isinstance(old, dict):
            old[draw(st.sampled_from(MORE))] = draw(VALUES)
        elif kind == "near" and isinstance(old, int | float):
            parent[key] = draw(st.sampled_from([-old, 0, 2 * old, old / 2, f"{old}", [old]]))
        else:
            parent[key] = draw(VALUES)
        said.append(f"{kind} {'.'.join(map(str, path))}")
        if not recipe:
            break
    return recipe, ", ".join(said)


@functools.cache
def _mutated(seed: int, number: int) -> list[tuple[dict[str, Any], str]]:
    found: list[tuple[dict[str, Any], str]] = []
    quiet = {"database": None, "deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=number, phases=[hypothesis.Phase.generate], **quiet)
    @hypothesis.given(mutations())
    def collect(mutation: tuple[dict[str, Any], str]) -> None:
        found.append(mutation)

    collect()
    return found


def mutated_recipe(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Run a recipe with one to three changed places. The recipe must run or raise one error message."""
    mutated = _mutated(campaign.seed, campaign.numbers["recipes"])
    recipe, what = mutated[int(folder.name.rpartition("-")[2]) % len(mutated)]
    (folder / "mutated.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True))
    said = call(["fit", "--config", "mutated.yaml", "--out", "out"], folder)
    return said.wrong(f"{what}\n{yaml.safe_dump(recipe)}") or Outcome("fine", what)
