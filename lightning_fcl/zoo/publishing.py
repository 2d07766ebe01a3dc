"""Publication of the network of a run: weights, configuration, card, and an entry in a registry."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import yaml
from safetensors.torch import save
from torch import Tensor, nn

from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.edge.report import device_report
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.table import Cell, metric_number, metric_title, read_table
from lightning_fcl.federation.aggregation import get_reductions
from lightning_fcl.federation.protocols import FederatedModule
from lightning_fcl.io.atomic import TemporaryFolder, disk_error_context, file_lock, write_atomic
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import read_text
from lightning_fcl.models.backbone import example_input, packaged_state
from lightning_fcl.models.serialization import to_plain_config
from lightning_fcl.runs.loaded_recipe import LoadedRecipe, load_into_recipe, load_newest_checkpoint, load_recipe
from lightning_fcl.runs.paper_rows import paper_folder, scale_folder
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.tasks.classification import Classifier
from lightning_fcl.validation import require_package
from lightning_fcl.zoo.continuation import continuation_bytes, make_continuation
from lightning_fcl.zoo.loading import features_or_outputs, load_folder, load_weights, make_network
from lightning_fcl.zoo.model_entry import (
    CARD,
    CHECK,
    CONFIG,
    CONTINUE,
    WEIGHTS,
    ModelEntry,
    OutputKind,
    check_name,
    read_folder,
    write_entry_checksums,
)
from lightning_fcl.zoo.pretrained import PretrainedModel
from lightning_fcl.zoo.registry import LOCK, REGISTRY, get_repo_head, read_registry, register, upload
from lightning_fcl.zoo.verifying import packaged_recipe, test_accuracy

_TOLD = ("final_accuracy/server", "average_accuracy/server", "forgetting/server", "upload_bytes/total")

ENERGY_METRIC = "energy_mj/learnt sample"
"""Energy in mJ to learn from one sample on the default device of `lightning-fcl edge-report`."""

LOST = 1e-3
"""Half precision is the default if it changes the test accuracy by at most this value."""


@runtime_checkable
class ExportsNetwork(FederatedModule, Protocol):
    """A task that can export a plain network that predicts the same classes as the task."""

    @property
    def output_kind(self) -> OutputKind:
        """Kind of the outputs of the exported network."""

    def to_network(self) -> nn.Module:
        """Return the plain network."""


def publish(
    run: str | Path,
    name: str,
    destination: str | Path,
    description: str = "",
    license: Mapping[str, str] | None = None,
    limitations: Sequence[str] = (),
    numbered_classes: bool = False,
    features: bool = False,
    half_precision: bool | None = None,
) -> Path | str:
    """Publish the network of a run to a folder with a registry, or to a repository of the Hugging Face hub.

    No data of a single client are published. Client-local tensors have the server's initial values. Statistics of a
    readout are published only if each class has samples of at least three clients, and only once per name.

    Args:
        run: Folder of the run, as given by ``--out`` of ``lightning-fcl fit``.
        name: Name such as ``"har_cnn.mydata.flwf"``. If the name exists, a new version is published.
        destination: Folder of the registry, or ``"hf:organization/repository"``. A repository contains only this
            network, and is created if it does not exist.
        description: Description in one sentence.
        license: Licenses of the ``"weights"`` and of the ``"data"``.
        limitations: Limitations, one sentence each.
        numbered_classes: Whether classes are named ``person 1``, ``person 2``, and so on, instead of by their names.
        features: Whether the network is published without class names, to compute features.
        half_precision: Whether weights are stored in half precision. None: only if this changes the test accuracy by at
            most 0.001.

    Returns:
        An argument for `lightning_fcl.zoo.load`: the folder of the entry, or its name on the hub with the new commit.

    Raises:
        ValueError: If ``name`` is invalid, ``destination`` is neither a folder nor a repository, or ``run`` is not a
            run. If the task has no network. If the registry is damaged, or the repository contains another network.
        ConnectionError: If the hub cannot be reached, or rejects a request.
    """
    check_name(name)
    if "://" in str(destination):
        raise InvalidValueError(
            f"Expected `destination` to be a folder or hf:organization/repository, but got {destination}.",
            hint="Publish to a folder, then copy the folder to the URL.",
            argument="destination",
            value=destination,
        )
    head = get_repo_head(str(destination)) if str(destination).startswith("hf:") else None
    if head is not None and head.entry is not None and head.entry.name != name:
        raise InvalidValueError(
            f"Expected hf:{head.repository} to contain {name}, but it contains {head.entry.name}.",
            hint=f"Publish as {head.entry.name}, or use another repository.",
            argument="name",
            value=name,
        )
    run = Path(run)
    results = read_results(run)
    checkpoint = load_newest_checkpoint(run)
    whole = Recipe((run / "config.yaml",)).with_values({"data.seed": results["seed"]})
    parts = load_into_recipe(load_recipe(whole), checkpoint)
    task = parts.model
    if not isinstance(task, ExportsNetwork):
        raise InvalidValueError(
            f"Expected a task with `to_network()` and `output_kind`, but `{type(task).__name__}` does not have both."
        )
    stream: FederatedStream = parts.datamodule
    backbone = stream.setup_with_images()
    network = task.to_network().eval()
    classes = [] if features or _private(parts) else list(stream.classes)
    recipe = {**(results["recipe"] or {}), "seed": results["seed"], "command": results["command"]}
    recipe |= packaged_recipe(run, results)
    shape = list(stream.get_samples(stream.plan.test[:1])[0].shape[1:])
    metric_names = {*results["expected"], *_TOLD, *_table_row(recipe)}
    metrics = {key: value for key, value in results["metrics"].items() if key in metric_names}
    entry = ModelEntry(
        name=name,
        version=1,
        description=description,
        network=to_plain_config(network),
        output_kind=task.output_kind if classes else "features",
        classes=[f"person {place + 1}" for place in range(len(classes))] if numbered_classes else classes,
        input_shape=shape,
        measurement=stream.samples.measurement,
        license=dict(license or {}),
        recipe=recipe | {"rounds_done": int(checkpoint["epoch"]) + 1},
        metrics=metrics | _energy(parts, shape) | {f"paper/{key}": value for key, value in results["expected"].items()},
        limitations=list(limitations),
        made_with={**results["versions"], "machine": results["machine"]},
    )
    model = PretrainedModel(network, entry)
    should_compare_precisions = (
        half_precision is None
        and classes
        and any(v.dtype == torch.float32 for v in _tensors(network, half=False).values())
    )
    models = {halved: model for halved in ([False, True] if should_compare_precisions else [bool(half_precision)])}
    # Compare the weights as they are after loading from a file in half precision.
    if True in models:
        models[True] = load_weights(make_network(entry), _tensors(network, half=True), entry)
    # The run was trained on precomputed features of the backbone. The published network computes them from images.
    if backbone is not None:
        stream.backbone = backbone
        stream.set_samples(stream.samples)
    accuracy = {halved: test_accuracy(one, stream) for halved, one in models.items()} if classes else {}
    half_precision = (
        len(accuracy) == 2 and abs(accuracy[True] - accuracy[False]) <= LOST
        if half_precision is None
        else half_precision
    )
    metrics = {"test_accuracy": accuracy[half_precision], **entry.metrics} if accuracy else entry.metrics
    entry = replace(entry, metrics=metrics, stored_dtype="float16" if half_precision else "float32")
    temporary = None if head is None else TemporaryFolder("push")
    registry_folder = Path(destination) if temporary is None else temporary.path
    with disk_error_context(registry_folder):
        registry_folder.mkdir(parents=True, exist_ok=True)
        with file_lock(registry_folder / LOCK):
            versions = [one.version for one in read_registry(registry_folder / REGISTRY) if one.name == name]
            versions += [head.entry.version] if head is not None and head.entry is not None else []
            continuation = make_continuation(checkpoint, parts, first=not versions)
            entry = replace(entry, version=max(versions, default=0) + 1)
            folder = _write(models[half_precision].network, entry, continuation, registry_folder)
    return folder if head is None else upload(folder, head, description or name)


def _energy(parts: LoadedRecipe, shape: Sequence[int]) -> dict[str, float]:
    """Return the energy in mJ to learn from one sample, as a metric by name. Return {} if it cannot be estimated."""
    with suppress(ValueError):
        report = device_report(parts.model, shape, reductions=parts.strategy.settings.rules)
        if not report["uncounted"]:
            return {ENERGY_METRIC: report["energy_mj"] / report["samples"]}
    return {}


def _private(parts: LoadedRecipe) -> bool:
    """Return whether a part of the network is client-local, or the outputs depend on the task of a sample."""
    if isinstance(parts.model, Classifier) and parts.model.task_incremental:
        return True
    reductions = get_reductions(parts.model, parts.strategy.settings.rules)
    return any(reduction.is_local and name.startswith("model.") for name, reduction in reductions.items())


def _tensors(network: nn.Module, half: bool) -> dict[str, Tensor]:
    """Return a network's tensors for a file, without tensors that installed packages provide.

    If ``half``, single-precision tensors are converted to half precision.
    """
    packaged = packaged_state(network)
    return {
        name: (value.half() if half and value.dtype == torch.float32 else value).contiguous()
        for name, value in plain_samples({**network.state_dict()}).items()
        if name not in packaged
    }


def _write(network: nn.Module, entry: ModelEntry, continuation: dict[str, Any] | str, registry_folder: Path) -> Path:
    """Write an entry's folder atomically into a registry's folder, register the entry, and return the new folder."""
    if isinstance(continuation, str):
        entry = replace(entry, recipe={**entry.recipe, "ends": continuation})
    folder, partial = safe_join(registry_folder, entry.folder), safe_join(registry_folder, f".{entry.folder}.part")
    # The registry does not list this folder, so an interrupted attempt has left it. `read_folder` raises an error if
    # the folder is not a valid entry, so that a folder with other content is not removed.
    if folder.exists():
        read_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_atomic(partial / WEIGHTS, save(_tensors(network, entry.stored_dtype == "float16")))
    sample = example_input(network, entry.input_shape)
    with torch.no_grad():
        pair = {"input": sample, "output": features_or_outputs(PretrainedModel(network, entry), sample).contiguous()}
    write_atomic(partial / CHECK, save(pair))
    if not isinstance(continuation, str):
        write_atomic(partial / CONTINUE, continuation_bytes(continuation))
    write_atomic(partial / CARD, model_card(entry, metric_spread(entry), _tensors(network, half=False)))
    write_atomic(partial / CONFIG, json.dumps(asdict(entry), indent=1, ensure_ascii=False) + "\n")
    write_entry_checksums(partial)
    load_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    register(folder)
    return folder


def metric_spread(entry: ModelEntry) -> dict[str, tuple[float, float, int]]:
    """Return mean, standard deviation and number of seeds of each metric, from the committed table of the recipe."""
    return {
        name: (cell.mean, cell.std, cell.n)
        for name, cell in _table_row(entry.recipe).items()
        if cell.mean is not None and cell.std is not None
    }


def _table_row(recipe: Mapping[str, Any]) -> Mapping[str, Cell]:
    """Return the cells of a recipe's row in the committed table of the paper, by metric.

    Without a committed table or without the row, return an empty mapping.
    """
    paper, row, configs = (recipe.get(key) for key in ("paper", "row", "configs"))
    if not (paper and configs):
        return {}
    scales = [Path(config).stem.removeprefix("scale-") for config in configs if Path(config).stem.startswith("scale-")]
    file = scale_folder(paper_folder(paper), [*scales, "paper"][0]) / "table.json"
    return read_table(file).rows.get(str(row), {}) if file.is_file() else {}


def model_card(entry: ModelEntry, spread: Mapping[str, tuple[float, float, int]], state: Mapping[str, Tensor]) -> str:
    """Return the text of an entry's ``README.md``, with metadata for the hub.

    Args:
        entry: The entry.
        spread: Mean, standard deviation and number of seeds of each metric, from `metric_spread`.
        state: Tensors of the network. The card contains their total number of values.
    """
    jinja2 = require_package("jinja2", "writes cards")
    template = jinja2.Template(read_text(Path(__file__).with_name("card.md")))
    text: str = template.render(
        entry=entry,
        metadata=yaml.safe_dump(_metadata(entry), sort_keys=False, allow_unicode=True).strip(),
        shape=tuple(entry.input_shape),
        numbers=sum(value.numel() for value in state.values()),
        rows=_rows(entry, spread),
        energy=ENERGY_METRIC,
        command=_command(entry.recipe),
        packages=[f"{name} {version}" for name, version in entry.made_with.items() if name != "machine"],
    )
    return text.rstrip("\n") + "\n"


def _metadata(entry: ModelEntry) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "library_name": "lightning-fcl",
        "tags": ["federated-learning", "continual-learning", "pytorch"],
    }
    if "weights" in entry.license:
        metadata |= {"license": "other", "license_name": entry.license["weights"]}
    if "test_accuracy" in entry.metrics:
        data = entry.name.split(".")[1] if "." in entry.name else "own"
        result = {
            "task": {"type": "other"},
            "dataset": {"name": data, "type": data},
            "metrics": [{"type": "accuracy", "value": round(entry.metrics["test_accuracy"], 4)}],
        }
        metadata["model-index"] = [{"name": entry.name, "results": [result]}]
    return metadata


def _rows(entry: ModelEntry, spread: Mapping[str, tuple[float, float, int]]) -> list[list[str]]:
    """Return a table row for each metric: title, value of the network, mean and deviation over seeds, paper's value."""
    rows = []
    for name in dict.fromkeys([*entry.metrics, *spread]):
        if name.startswith("paper/"):
            continue
        network_value, paper = (
            "" if value is None else metric_number(name, value)
            for value in (entry.metrics.get(name), entry.metrics.get(f"paper/{name}"))
        )
        mean, std, number = spread.get(name, (0.0, 0.0, 0))
        seed_summary = f"{metric_number(name, mean)} ± {metric_number(name, std)} ({number})" if number else ""
        rows.append([metric_title(name), network_value, seed_summary, paper])
    return rows


def _command(recipe: Mapping[str, Any]) -> str:
    if not recipe.get("configs"):
        return str(recipe.get("command", ""))
    words = [f"--config recipes/{config}" for config in recipe["configs"]]
    words += [word if word.startswith("--") else f"'{word}'" for word in recipe["words"]]
    return f"lightning-fcl fit {' '.join(words)} --seed_everything {recipe['seed']}"
