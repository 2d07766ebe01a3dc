"""Verification of published networks against their cards, with the recipes of the package."""

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
"""Largest allowed difference from the test accuracy on the card. Rounding differs between processors."""

# Keys of a run's configuration that do not belong to the recipe.
_NO_PART = ("out", "config", "ckpt_path", "weights_only", "recipe")


class UnknownRecipeError(UnknownNameError):
    """An error for a published network whose recipe is not in this package."""


@dataclass(frozen=True)
class VerificationResult:
    """Result of a verification.

    Args:
        name: Name and version of the entry.
        is_reproduced: Whether the outputs, and the test accuracy if it was measured, agree with the published values.
        published_accuracy: Test accuracy on the card. None if it was not measured.
        measured_accuracy: Test accuracy measured by the verification. None if it was not measured, see ``reason``.
        difference: Largest difference from the published outputs, relative to the largest published output. 0 if the
            entry has no published outputs.
        reason: Reason why the accuracy was not measured. Empty if it was measured.
    """

    name: str
    is_reproduced: bool
    published_accuracy: float | None
    measured_accuracy: float | None
    difference: float
    reason: str = ""


def verify(name: str | Path) -> VerificationResult:
    """Compare a published network with its card, on the published input, and on the test samples if available.

    Args:
        name: Name or folder, as in `lightning_fcl.zoo.load`.

    Raises:
        ValueError: If a file is damaged, or does not match the network.
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
        reason = "the network has no class names"
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
    """Return the accuracy of a network on a stream's test samples. Outputs of time steps count separately."""
    right = total = 0
    for rows in torch.split(torch.from_numpy(stream.plan.test), BATCH_SIZE):
        x, y = stream.get_samples(rows.numpy())
        predicted = model(x).argmax(dim=-1)
        labels: Tensor = y[:, None].expand_as(predicted) if predicted.dim() > 1 else y
        right += int((predicted == labels).sum())
        total += labels.numel()
    return right / total


def packaged_recipe(run: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files, settings and SHA-256 of the recipe of a run, or {} if the recipe is not in the package.

    The comparison ignores empty values, the section `recipe`, the output folder and other settings of the command, and
    the numbers of devices and nodes. The result of a federation does not depend on the number of processes.
    """
    plain = _on_any_processes(_plain(read_yaml(run / "config.yaml")))
    for candidate in _candidates(results["recipe"] or {"paper": "", "row": ""}):
        candidate_config = resolve_recipe(candidate.with_values({"seed_everything": results["seed"]}))
        if _on_any_processes(_plain(candidate_config)) == plain:
            return _recipe_mark(candidate)
    return {}


def _candidates(recipe: Mapping[str, str]) -> Iterator[Recipe]:
    """Yield the recipes of the package for the paper and row of a run, one for each scale.

    For a run without a paper, yield the quickstart.
    """
    if not recipe["paper"]:
        yield Recipe((recipes_folder() / "quickstart.yaml",))
        return
    try:
        folder = paper_folder(recipe["paper"])
        for name in ("paper", *(path.stem.removeprefix("scale-") for path in sorted(folder.glob("scale-*.yaml")))):
            row = paper_rows(folder, [recipe["row"]], name)[recipe["row"]]
            yield Recipe((*scaled_configs(row.configs, name), *row.settings))
    # The row is not in the package, or not at this scale.
    except ValueError:
        return


def recipe_parts(recipe: Mapping[str, Any], name: str, overrides: Sequence[Path | Setting] = ()) -> LoadedRecipe:
    """Return the objects of the recipe of a published network, loaded from an identical recipe of the package.

    Args:
        recipe: The recipe in the entry.
        name: Name of the entry, for the error message.
        overrides: Files and settings that override the recipe.

    Raises:
        UnknownRecipeError: If the package contains no identical recipe.
    """
    for candidate in _candidates({key: str(recipe.get(key) or "") for key in ("paper", "row")}):
        # A recipe can run code. Therefore the recipe in the entry is only compared, and the package's recipe is loaded.
        if _recipe_mark(candidate).items() <= recipe.items() and type(seed := recipe.get("seed")) is int:
            return load_recipe(candidate.with_values({"data.seed": seed}).with_layers(*overrides))
    raise UnknownRecipeError(
        f"Expected the recipe of {name} to be in this package, but the package contains no identical recipe.",
        hint="If another version of lightning-fcl contains the recipe, install that version. The entry's `made_with` "
        "contains the version of the run.",
        argument="recipe",
        value=name,
    )


def _recipe_mark(recipe: Recipe) -> dict[str, Any]:
    """Return the files, settings and SHA-256 of a recipe. The SHA-256 ignores comments and the section `recipe`."""
    names = [file.relative_to(recipes_folder()).as_posix() for file in recipe.files]
    content = [_plain(read_yaml(path)) for path in recipe.files]
    words = Recipe(recipe.settings).words
    digest = hashlib.sha256(json.dumps([content, words]).encode()).hexdigest()
    return {"configs": names, "words": words, "sha256": digest}


def _on_any_processes(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without the numbers of devices and nodes, which set the number of processes."""
    trainer = {key: value for key, value in recipe["trainer"].items() if key not in ("devices", "num_nodes")}
    return {**recipe, "trainer": trainer}


def _plain(content: Any) -> Any:
    """Return a recipe without empty values, and without keys that do not belong to the recipe."""
    if isinstance(content, Mapping):
        items = {key: _plain(value) for key, value in content.items() if key not in _NO_PART}
        return {key: value for key, value in items.items() if value not in (None, {}, [])}
    return [_plain(value) for value in content] if isinstance(content, list) else content
