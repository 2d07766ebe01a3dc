"""Published networks are compared with what their cards say, by the recipe of the package that each is of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.data.feature_cache import BATCH_SIZE
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.runs.fit import resolve_recipe
from lightning_fcl.runs.loaded_recipe import LoadedRecipe, load_recipe
from lightning_fcl.runs.paper_rows import paper_folder, paper_rows, recipes_folder, scaled_configs
from lightning_fcl.runs.recipe import Recipe, Setting
from lightning_fcl.zoo.loading import TOLERANCE, load_folder, read_tensors, relative_output_difference
from lightning_fcl.zoo.model_entry import CHECK
from lightning_fcl.zoo.pretrained import PretrainedModel
from lightning_fcl.zoo.registry import resolve_folder

SHARE = 1e-3
"""The share of test samples that may be told otherwise than the card says: processors round otherwise."""

_NO_PART = ("out", "config", "ckpt_path", "weights_only", "recipe")


class UnknownRecipeError(UnknownNameError):
    """A published network's recipe is not one of this package."""


@dataclass(frozen=True)
class VerificationResult:
    """What came of a comparison.

    Args:
        name: The entry's.
        is_reproduced: Whether it is what its card says.
        published_accuracy: The accuracy on the test samples by the card, or None where none was measured.
        measured_accuracy: That which was measured now, or None: ``reason`` tells.
        difference: From the published outputs of the published input, by the largest of these.
        reason: Why the accuracy was not measured; empty if it was.
    """

    name: str
    is_reproduced: bool
    published_accuracy: float | None
    measured_accuracy: float | None
    difference: float
    reason: str = ""


def verify(name: str | Path) -> VerificationResult:
    """Compare a published network with its card: on its data where they are, and on the published input.

    Raises:
        ValueError: If a file is damaged, or does not fit.
        FileNotFoundError: If a file is missing.

    Example:
        >>> verdict = verify("mlp.digits.flwf2t_replay")
        >>> verdict.is_reproduced, verdict.published_accuracy == verdict.measured_accuracy
        (True, True)
    """
    folder = resolve_folder(name)
    model = load_folder(folder, check=False)
    entry = model.entry
    difference = relative_output_difference(model, read_tensors(folder / CHECK)) if (folder / CHECK).is_file() else 0.0
    card, measured_accuracy, reason = entry.metrics.get("test_accuracy"), None, ""
    if card is None:
        reason = "it names no classes"
    else:
        try:
            stream = recipe_parts(entry.recipe, entry.full_name).datamodule
            stream.setup_with_images()
            measured_accuracy = test_accuracy(model, stream)
        except (FileNotFoundError, UnknownRecipeError) as error:
            reason = str(error)
    right = difference <= TOLERANCE and (measured_accuracy is None or abs(measured_accuracy - (card or 0)) <= SHARE)
    return VerificationResult(entry.full_name, right, card, measured_accuracy, difference, reason)


@torch.no_grad()
def test_accuracy(model: PretrainedModel, stream: FederatedStream) -> float:
    """The share of a stream's test samples, or of their steps, whose class a network tells."""
    right = total = 0
    for rows in torch.split(torch.from_numpy(stream.plan.test), BATCH_SIZE):
        x, y = stream.get_samples(rows.numpy())
        predicted = model(x).argmax(dim=-1)
        labels: Tensor = y[:, None].expand_as(predicted) if predicted.dim() > 1 else y
        right += int((predicted == labels).sum())
        total += labels.numel()
    return right / total


def packaged_recipe(run: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Which recipe of the package a run is of: its files, further words and their SHA-256; empty: none.

    What a recipe says of itself and of its numbers does not count, nor where results go, nor on how many processes a
    federation ran: its result is the same.
    """
    plain = _on_any_processes(_plain(read_yaml(run / "config.yaml")))
    for candidate in _candidates(results["recipe"] or {"paper": "", "row": ""}):
        candidate_config = resolve_recipe(candidate.with_values({"seed_everything": results["seed"]}))
        if _on_any_processes(_plain(candidate_config)) == plain:
            return _recipe_mark(candidate)
    return {}


def _candidates(recipe: Mapping[str, str]) -> Iterator[Recipe]:
    """The recipes of the package that may be a run's, by the paper and row that it tells: at each scale."""
    if not recipe["paper"]:
        yield Recipe((recipes_folder() / "quickstart.yaml",))
        return
    try:
        folder = paper_folder(recipe["paper"])
        for name in ("paper", *(path.stem.removeprefix("scale-") for path in sorted(folder.glob("scale-*.yaml")))):
            row = paper_rows(folder, [recipe["row"]], name)[recipe["row"]]
            yield Recipe((*scaled_configs(row.configs, name), *row.settings))
    except ValueError:  # another's row, or none of this scale
        return


def recipe_parts(recipe: Mapping[str, Any], name: str, overrides: Sequence[Path | Setting] = ()) -> LoadedRecipe:
    """What the recipe of a published network stands for, if it is one of the package as it is now.

    Args:
        overrides: Files and settings that go over it.
    """
    for candidate in _candidates({key: str(recipe.get(key) or "") for key in ("paper", "row")}):
        # A recipe is a program: of what the entry tells nothing is run, it is only compared.
        if _recipe_mark(candidate).items() <= recipe.items() and type(seed := recipe.get("seed")) is int:
            return load_recipe(candidate.with_values({"data.seed": seed}).with_layers(*overrides))
    raise UnknownRecipeError(
        f"Expected {name} to be of a recipe of this package but its own is another.",
        hint="Install the version of lightning-fcl that its entry names.",
        argument="recipe",
        value=name,
    )


def _recipe_mark(recipe: Recipe) -> dict[str, Any]:
    """A recipe's files, settings as words, and SHA-256: comments, and what it says of itself, may change."""
    names = [file.relative_to(recipes_folder()).as_posix() for file in recipe.files]
    content = [_plain(read_yaml(path)) for path in recipe.files]
    words = Recipe(recipe.settings).words
    digest = hashlib.sha256(json.dumps([content, words]).encode()).hexdigest()
    return {"configs": names, "words": words, "sha256": digest}


def _on_any_processes(recipe: dict[str, Any]) -> dict[str, Any]:
    trainer = {key: value for key, value in recipe["trainer"].items() if key not in ("devices", "num_nodes")}
    return {**recipe, "trainer": trainer}


def _plain(content: Any) -> Any:
    """A recipe without what is not said, and without what differs from run to run."""
    if isinstance(content, Mapping):
        items = {key: _plain(value) for key, value in content.items() if key not in _NO_PART}
        return {key: value for key, value in items.items() if value not in (None, {}, [])}
    return [_plain(value) for value in content] if isinstance(content, list) else content
