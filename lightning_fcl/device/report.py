"""What a microcontroller would need to train a module in a federation, estimated without training.

What is counted, and in which units, is said in `footprint` and `trace` beside this module; what was measured on which
device, and what is assumed to carry it over to other models, in profiles.yaml. M_F is computed anew for each sample and
epoch. Not counted are the passes and the memory of callbacks (a teacher's forward pass, a replay buffer), the data, the
inputs that skip connections keep, and the program itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from lightning_fcl.device.footprint import Footprint, measure
from lightning_fcl.device.profiles import Device, Medium, read_device, read_link
from lightning_fcl.device.trace import Layer
from lightning_fcl.errors import at_least, require
from lightning_fcl.evaluation.table import markdown_table
from lightning_fcl.federation.aggregation import Rules
from lightning_fcl.federation.speeds import Speeds

# Of the paper's setting, where neither the recipe nor the caller says: images of a person, and drones in a swarm.
SAMPLES = 28
NODES = 3


def device_report(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    reductions: Rules | None = None,
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
    at_least(1, samples=samples, nodes=nodes, local_epochs=local_epochs)
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"Expected `input_shape` of sizes of at least 1 but got {tuple(input_shape)}.")
    device, medium = read_device(profile), read_link(link)
    footprint = measure(module, input_shape, reductions)
    memory = _memory(footprint)
    trained, frozen = footprint.numbers(True), footprint.numbers(False)
    mixed = {"trained": footprint.bytes(True), "frozen": footprint.bytes(False)}
    need = {"tcdm": memory["tcdm"]["bytes"], "ram": memory["ram"], "flash": memory["flash"]}
    if "tcdm" not in device.memory:  # one memory for all: the layer at hand is worked on in RAM
        need["ram"] += need["tcdm"]
    return {
        "input": list(input_shape),
        "samples": samples,
        "nodes": nodes,
        "local_epochs": local_epochs,
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
        "memory": memory,
        **_costs(footprint, device, medium, samples, nodes, local_epochs),
        "fits": {
            name: {"need": need[name], "have": size, "fits": need[name] <= size} for name, size in device.memory.items()
        },
        "uncounted": list(footprint.uncounted),
        "device": asdict(device) | {"int8_macs_per_s": device.int8_rate, "fp32_macs_per_s": device.fp32_rate},
        "link": asdict(medium),
    }


def device_speeds(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    reductions: Rules | None = None,
    profile: str | Path = "gap9-lpm",
    link: str | Path = "uwb-loco",
    latency: float = 0.0,
    spread: float = 0.0,
    variation: float = 0.0,
) -> Speeds:
    """The speeds of clients that are all such devices, each with a link of its own: an estimate, as `device_report` is.

    Module, shape, reductions, profile and link are as there; latency (s), spread and variation as `Speeds` takes them.

    Raises:
        ValueError: If an argument is out of range, or the module does not take such samples.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> speeds = device_speeds(DSICNet(num_classes=10), (1, 64, 48), reductions={"backbone.*": "fixed"})
        >>> round(28 * speeds.typical.seconds_per_sample, 4)  # an epoch that was measured
        0.1784
        >>> round(speeds.typical.upload_bandwidth)  # bytes per second
        14141
    """
    report = device_report(module, input_shape, reductions=reductions, profile=profile, link=link)
    medium = read_link(link)
    bandwidth = medium.bytes / medium.seconds
    return Speeds(report["time"]["sample_s"], bandwidth, bandwidth, latency, spread, variation)


def report_text(report: Mapping[str, Any]) -> str:
    """A report, with the ``recipes`` that it is of, in Markdown tables that a terminal shows well, too."""
    jinja2 = require("jinja2", "writes device reports")
    template = jinja2.Template(Path(__file__).with_name("report.md").read_text(encoding="utf-8"))
    text: str = template.render(report, table=markdown_table, seconds=_seconds)
    return text.rstrip("\n") + "\n"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


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
    footprint: Footprint, device: Device, link: Medium, samples: int, nodes: int, local_epochs: int
) -> dict[str, Any]:
    up, down = (sum(getattr(entry, name) for entry in footprint.entries) for name in ("upload", "download"))
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
