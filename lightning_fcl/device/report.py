"""`lightning-fcl device-report`: what a microcontroller would need to run a recipe, estimated without training.

What is counted, and in which units, is said in `footprint` and `trace` beside this module; what was measured on which
device, and what is assumed to carry it over to other models, in profiles.yaml. M_F is computed anew for each sample and
epoch. Not counted are the passes and the memory of callbacks (a teacher's forward pass, a replay buffer), the data, the
inputs that skip connections keep, and the program itself.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from lightning_fcl.data.batches import round_half_up
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.device.footprint import Footprint, measure
from lightning_fcl.device.profiles import Device, Link, read_device, read_link
from lightning_fcl.device.table import render
from lightning_fcl.device.trace import Layer
from lightning_fcl.evaluation.report import write_whole
from lightning_fcl.models.quantization import fold_batchnorm

# Of the paper's setting, where neither the recipe nor the caller says: images of a person, and drones in a swarm.
SAMPLES = 28
NODES = 3


def device_report(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    reductions: Mapping[str, str] | None = None,
    samples: int = SAMPLES,
    nodes: int = NODES,
    local_epochs: int = 1,
    profile: str | Path = "gap9-lpm",
    link: str | Path = "uwb-loco",
) -> dict[str, Any]:
    """What a microcontroller would need to train a module in a federation.

    Args:
        module: A LightningModule, or any module that maps a batch of samples to outputs.
        input_shape: Shape of a sample, without the batch.
        reductions: Pattern of state entries -> reduction, as `FederatedStrategy` takes them: ``{"model.backbone.*":
            "fixed"}`` freezes the backbone.
        samples: Samples of a local epoch.
        nodes: Nodes that take part in a round.
        local_epochs: Local epochs of a round.
        profile: A device of profiles.yaml, or a YAML file of your own.
        link: A link of profiles.yaml, or a YAML file of your own.

    Returns:
        Plain values, as in ``device.json``: ``parameters``, ``bytes``, ``macs`` of a sample, ``memory`` (bytes),
        ``synchronisation`` (bytes per node and round, and s), ``time`` (s), ``energy_mj`` of a local epoch, ``fits``,
        ``uncounted``, and what was asked for.

    Raises:
        ValueError: If an argument is out of range, or the module does not take such samples.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> report = device_report(DSICNet(num_classes=10), (1, 64, 48), reductions={"backbone.*": "fixed"})
        >>> report["parameters"]["trained"], report["synchronisation"]["upload_bytes"]
        (6010, 24040)
        >>> round(report["time"]["local_epoch_s"], 4), round(report["time"]["federated_epoch_s"], 1)
        (0.1784, 10.4)
    """
    for name, number in (("samples", samples), ("nodes", nodes), ("local_epochs", local_epochs)):
        if number < 1:
            raise ValueError(f"Expected `{name}` to be at least 1 but got {number}.")
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"Expected `input_shape` of sizes of at least 1 but got {tuple(input_shape)}.")
    device, medium = read_device(profile), read_link(link)
    footprint = measure(module, input_shape, reductions)
    memory = _memory(footprint)
    return {
        "input": list(input_shape),
        "samples": samples,
        "nodes": nodes,
        "local_epochs": local_epochs,
        **_held(footprint),
        "memory": memory,
        **_costs(footprint, device, medium, samples, nodes, local_epochs),
        "fits": _fits(memory, device.memory),
        "uncounted": list(footprint.uncounted),
        "device": asdict(device) | {"int8_macs_per_s": device.int8_rate, "fp32_macs_per_s": device.fp32_rate},
        "link": asdict(medium),
    }


def _held(footprint: Footprint) -> dict[str, Any]:
    trained, frozen = footprint.numbers(True), footprint.numbers(False)
    mixed = {"trained": footprint.bytes(True), "frozen": footprint.bytes(False)}
    return {
        "parameters": {
            "all": trained + frozen,
            "trained": trained,
            "frozen": frozen,
            "unfolded": footprint.unfolded,
            "folded_norms": footprint.folded,
        },
        "bytes": {"all": sum(mixed.values()), **mixed, "all_fp32": 4 * (trained + frozen)},
        "macs": {
            "frozen_forward": footprint.frozen_forward,
            "trained_forward": footprint.trained_forward,
            "learning": footprint.learning,
            "learns_by": "statistics" if footprint.statistics else "gradients",
        },
    }


def _memory(footprint: Footprint) -> dict[str, Any]:
    """Bytes of activations, of the layer at hand, and of what lies in RAM and flash."""
    learning = [layer for layer in footprint.layers if layer.trained]
    step = max(learning, key=lambda layer: layer.working, default=None)
    # A descent keeps a gradient of M_T and the server's M_T, which methods such as FedProx compare with.
    copies = 0 if footprint.statistics else 2 * footprint.bytes(True)
    model = footprint.bytes(True) + footprint.bytes(False)
    stored = sum(entry.bytes for entry in footprint.entries if entry.name not in ("readout.A", "readout.B"))
    at_once = 0 if step is None else step.working if footprint.statistics else step.all_buffers
    return {
        "inference": _largest(footprint.layers, "activations"),
        "learning": {"bytes": step.working if step else 0, "layer": step.name if step else "", "at_once": at_once},
        "tcdm": _largest(footprint.layers, "working"),
        "kept": footprint.kept,
        "ram": model + copies + footprint.kept,
        "flash": stored if footprint.statistics else model,
    }


def _largest(layers: Sequence[Layer], what: str) -> dict[str, Any]:
    largest = max(layers, key=lambda layer: getattr(layer, what), default=None)
    return {"bytes": getattr(largest, what) if largest else 0, "layer": largest.name if largest else ""}


def _costs(
    footprint: Footprint, device: Device, link: Link, samples: int, nodes: int, local_epochs: int
) -> dict[str, Any]:
    up, down = (sum(getattr(entry, way) for entry in footprint.entries) for way in ("upload", "download"))
    epoch = device.seconds(samples * footprint.frozen_forward, samples * footprint.fp32_macs)
    transfers = link.time(up) + link.time(down)
    sync, ad_hoc = nodes * transfers, (nodes - 1) * transfers
    return {
        "synchronisation": {
            "upload_bytes": up,
            "download_bytes": down,
            "simulated_upload_bytes": footprint.simulated[0],
            "simulated_download_bytes": footprint.simulated[1],
            "upload_s": link.time(up),
            "download_s": link.time(down),
        },
        "time": {
            "sample_s": epoch / samples,
            "local_epoch_s": epoch,
            "synchronisation_s": sync,
            "federated_epoch_s": local_epochs * epoch + sync,
            "synchronisation_ad_hoc_s": ad_hoc,
            "federated_epoch_ad_hoc_s": local_epochs * epoch + ad_hoc,
            "local_epochs_in_federated_epoch": int((local_epochs * epoch + sync) / epoch) if epoch else None,
        },
        "energy_mj": device.millijoules(epoch),
    }


def _fits(memory: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    need = {"tcdm": memory["tcdm"]["bytes"], "ram": memory["ram"], "flash": memory["flash"]}
    if "tcdm" not in sizes:  # one memory for all: the layer at hand is worked on in RAM
        need["ram"] += need["tcdm"]
    return {name: {"need": need[name], "have": size, "fits": need[name] <= size} for name, size in sizes.items()}


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
    from lightning_fcl.cli.run import resolve

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


def report_recipe(
    recipes: Sequence[str | Path],
    profile: str = "gap9-lpm",
    link: str = "uwb-loco",
    nodes: int | None = None,
    samples: int | None = None,
    input_shape: Sequence[int] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Print what a recipe needs; also write ``device.json`` and ``device.md`` into a folder.

    Args:
        recipes: Files, later ones over earlier ones.
        profile: As in `device_report`.
        link: As in `device_report`.
        nodes: Nodes of a round; default: the clients that take part in the recipe's fullest round, or 3 without data.
        samples: Samples of a local epoch; default: the recipe's mean per client and round, or 28 without data.
        input_shape: Shape of a sample; default: that of the recipe's data.
        out: Folder to write to.

    Returns:
        What `device_report` returns, and the ``recipes``.

    Raises:
        ValueError: If a recipe or an argument is not understood.
        FileNotFoundError: If the shape of a sample is not known, as the recipe's data are not there.
    """
    setting = read_setting(recipes)
    if any(callback["class_path"].endswith(".BaseSession") for callback in setting.callbacks):
        fold_batchnorm(setting.module)  # as the callback does before the first round
    if input_shape is None or samples is None or nodes is None:
        shape, seen, clients = _of_data(setting, required=input_shape is None)
        input_shape = shape if input_shape is None else input_shape
        samples = seen if samples is None else samples
        nodes = clients if nodes is None else nodes
    report = device_report(
        setting.module,
        input_shape,
        reductions=setting.reductions,
        samples=samples,
        nodes=nodes,
        local_epochs=setting.local_epochs,
        profile=profile,
        link=link,
    )
    report = {"recipes": [str(path) for path in recipes], **report}
    text = render(report)
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        print(write_whole(out / "device.json", json.dumps(report, indent=1) + "\n"))
        print(write_whole(out / "device.md", text))
    return report


def _of_data(setting: Setting, required: bool) -> tuple[tuple[int, ...], int, int]:
    """Shape of a sample, mean samples of a client in a round, and clients of the fullest round."""
    stream = setting.stream
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream.setup("fit")
    except FileNotFoundError as error:
        if required:
            raise FileNotFoundError(
                "Expected the recipe's data, for the shape of a sample, but they are not there. Give the shape with "
                f"--input, as in --input 1,64,48. ({error})"
            ) from error
        return (), SAMPLES, NODES
    rounds = stream.plan.train
    sizes = [len(indices) for current in rounds for indices in current.values() if len(indices)]
    most, clients = setting.participation, max(len(current) for current in rounds)
    most = round_half_up(most * len(stream.plan.clients)) if isinstance(most, float) else most
    sample = stream.take(rounds[0][next(iter(rounds[0]))][:1])[0]
    return tuple(sample.shape[1:]), round_half_up(sum(sizes) / len(sizes)), max(1, min(most, clients))


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that a command line gives.

    Raises:
        ValueError: If it is none.

    Example:
        >>> parse_shape("1,64,48")
        (1, 64, 48)
    """
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = (0,)
    if min(shape) < 1:
        raise ValueError(f"Expected `--input` to be sizes with commas between them, as in 1,64,48, but got {text}.")
    return shape
