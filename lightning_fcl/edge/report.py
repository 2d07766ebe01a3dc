"""Estimate of the resources that a microcontroller needs to train a module in a federation, without training.

The modules `footprint` and `macs` define the counted quantities and their units. The file profiles.yaml contains the
measurements on devices, and the assumptions for estimates of other models. The frozen part M_F is computed again for
each sample and epoch. The estimate excludes the computation and memory of callbacks, such as a teacher's forward pass
or a replay buffer. It also excludes the memory of the data, of inputs that skip connections store, and of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lightning_fcl.edge.footprint import Footprint, measure_footprint
from lightning_fcl.edge.macs import Layer
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.table import markdown_table
from lightning_fcl.federation.aggregation import ReductionRules
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.io.reading import read_text
from lightning_fcl.io.safe_yaml import parse_dataclass, read_yaml
from lightning_fcl.validation import above, at_least, did_you_mean, one_of, require_package, validate_fields

PROFILES_FILE = Path(__file__).with_name("profiles.yaml")
# Defaults from Kröger et al. 2025: 28 images of a person, and 3 drones in a swarm. Callers can set other values.
SAMPLES = 28
NUM_NODES = 3


@dataclass(frozen=True)
class DeviceProfile:
    """A microcontroller at one operating point, and the measured time of one local epoch at this point.

    One measurement can determine only one number. Therefore the ratio of the int8 rate to the fp32 rate is an
    assumption, ``int8_per_fp32``. With the resulting rates, the estimated time of the measured model equals the
    measured time by construction. The times of other models are estimates.

    Args:
        name: Name of the device.
        power_mw: Power during training, in mW.
        samples_per_run: Number of samples of the measured local epoch.
        latency_ms: Time of the measured epoch, in ms.
        int8_macs: int8 MACs of one sample of the measured model: the forward pass of the frozen part.
        fp32_macs: fp32 MACs of one sample of the measured model: forward and backward pass of the trained part.
        int8_per_fp32: Number of int8 MACs that take the time of one fp32 MAC.
        memory: Sizes of the memories in bytes. The keys are one or more of ``tcdm``, ``ram`` and ``flash``.
        description: Short description for the report.
        source: Publication of the measurement.
        frequency_mhz: Clock frequency in MHz. 0: not stated.
        voltage_mv: Voltage in mV. 0: not stated.
    """

    name: str
    power_mw: float
    samples_per_run: int
    latency_ms: float
    int8_macs: int
    fp32_macs: int
    int8_per_fp32: float
    memory: dict[str, int]
    description: str = ""
    source: str = ""
    frequency_mhz: float = 0
    voltage_mv: float = 0

    def __post_init__(self) -> None:
        validate_fields(self)
        numbers = {
            name: vars(self)[name]
            for name in ("power_mw", "samples_per_run", "latency_ms", "fp32_macs", "int8_per_fp32")
        }
        above(0, **numbers, **self.memory)
        at_least(0, int8_macs=self.int8_macs)
        for name in self.memory:
            one_of(("tcdm", "ram", "flash"), memory=name)

    @property
    def fp32_rate(self) -> float:
        """Effective number of fp32 MACs per second."""
        return self.samples_per_run * (self.int8_macs / self.int8_per_fp32 + self.fp32_macs) / (self.latency_ms / 1000)

    @property
    def int8_rate(self) -> float:
        """Effective number of int8 MACs per second."""
        return self.int8_per_fp32 * self.fp32_rate

    def seconds(self, int8_macs: float, fp32_macs: float) -> float:
        """Return the time of the given numbers of MACs, in s."""
        return int8_macs / self.int8_rate + fp32_macs / self.fp32_rate


@dataclass(frozen=True)
class LinkProfile:
    """A shared medium on which one node sends at a time, and the measured time of one transfer.

    Args:
        name: Name of the link.
        payload_nbytes: Number of bytes of the measured transfer.
        transfer_s: Time of the measured transfer, in s.
        description: Short description for the report.
        source: Publication of the measurement.
    """

    name: str
    payload_nbytes: int
    transfer_s: float
    description: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        validate_fields(self)
        above(0, payload_nbytes=self.payload_nbytes, transfer_s=self.transfer_s)

    def transfer_time(self, size: int) -> float:
        """Return the time to transfer ``size`` bytes, in s, in proportion to the measured transfer."""
        return self.transfer_s * size / self.payload_nbytes


Profile = TypeVar("Profile", DeviceProfile, LinkProfile)


def read_device(name: str | Path) -> DeviceProfile:
    """Return a device of profiles.yaml, or of your own YAML file with the same keys."""
    return _read(DeviceProfile, str(name), "devices", "profile")


def read_link(name: str | Path) -> LinkProfile:
    """Return a link of profiles.yaml, or of your own YAML file with the same keys."""
    return _read(LinkProfile, str(name), "links", "link")


def _read(kind: type[Profile], name: str, section: str, option: str) -> Profile:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return parse_dataclass(kind, read_yaml(path), path, name=path.stem)
    profiles = read_yaml(PROFILES_FILE)[section]
    if name not in profiles:
        raise UnknownNameError(
            f"Expected `{option}` to be one of {', '.join(profiles)}, or your own YAML file, but got {name}.",
            hint=did_you_mean(name, profiles),
            argument=option,
            value=name,
        )
    return parse_dataclass(kind, profiles[name], f"{name} of {PROFILES_FILE.name}", name=name)


def device_report(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    reductions: ReductionRules | None = None,
    samples: int = SAMPLES,
    nodes: int = NUM_NODES,
    local_epochs: int = 1,
    profile: str | Path = "gap9-lpm",
    link: str | Path = "uwb-loco",
) -> dict[str, Any]:
    """Return an estimate of the resources that a microcontroller needs to train a module in a federation.

    Args:
        module: A LightningModule, or any module that maps a batch of samples to outputs.
        input_shape: Shape of a sample, without the batch dimension.
        reductions: Reductions by pattern of tensor names, as in `FederatedStrategy`. For example,
            ``{"model.backbone.*": "constant"}`` freezes the backbone.
        samples: Number of samples of a local epoch.
        nodes: Number of nodes that participate in a round.
        local_epochs: Number of local epochs of a round.
        profile: Name of a device in profiles.yaml, or your own YAML file.
        link: Name of a link in profiles.yaml, or your own YAML file.

    Returns:
        A dict of plain values, as in ``device.json``. It has the keys ``parameters``, ``bytes``, ``macs`` (per sample),
        ``memory`` (in bytes), ``synchronisation`` (bytes per node and round, and times in s), ``time`` (in s),
        ``energy_mj`` (of a local epoch), ``fits`` (for each memory of the device) and ``uncounted`` (names of layers).
        It also contains the input shape, the numbers of samples, nodes and local epochs, and the two profiles.

    Raises:
        ValueError: If an argument is out of range, or the module does not accept samples of this shape.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> report = device_report(DSICNet(num_classes=10), (1, 64, 48), reductions={"backbone.*": "constant"})
        >>> report["parameters"]["trained"], report["synchronisation"]["upload_bytes"]
        (6010, 24040)
        >>> round(report["time"]["local_epoch_s"], 4), round(report["time"]["federated_epoch_s"], 1)
        (0.1784, 10.4)
    """
    at_least(1, samples=samples, nodes=nodes, local_epochs=local_epochs)
    if not input_shape or min(input_shape) < 1:
        raise InvalidValueError(
            f"Expected `input_shape` to contain at least one size, and no size below 1, but got {tuple(input_shape)}.",
            argument="input_shape",
        )
    device, medium = read_device(profile), read_link(link)
    footprint = measure_footprint(module, input_shape, reductions)
    memory = _memory(footprint)
    trained, frozen = footprint.num_elements(True), footprint.num_elements(False)
    mixed = {"trained": footprint.nbytes(True), "frozen": footprint.nbytes(False)}
    need = {"tcdm": memory["tcdm"]["bytes"], "ram": memory["ram"], "flash": memory["flash"]}
    # A device without TCDM also processes the current layer in RAM.
    if "tcdm" not in device.memory:
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
    reductions: ReductionRules | None = None,
    profile: str | Path = "gap9-lpm",
    link: str | Path = "uwb-loco",
    latency: float = 0.0,
    spread: float = 0.0,
    variation: float = 0.0,
) -> ClientSpeeds:
    """Return estimated speeds of clients that all have the same device, and links of the same speed.

    The estimate is based on `device_report`.

    Args:
        module: As in `device_report`.
        input_shape: As in `device_report`.
        reductions: As in `device_report`.
        profile: As in `device_report`.
        link: As in `device_report`.
        latency: As in `ClientSpeeds`, in s.
        spread: As in `ClientSpeeds`.
        variation: As in `ClientSpeeds`.

    Raises:
        ValueError: If an argument is out of range, or the module does not accept samples of this shape.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> speeds = device_speeds(DSICNet(num_classes=10), (1, 64, 48), reductions={"backbone.*": "constant"})
        >>> round(28 * speeds.typical.seconds_per_sample, 4)  # time of the measured epoch
        0.1784
        >>> round(speeds.typical.upload_bandwidth)  # bytes per second
        14141
    """
    report = device_report(module, input_shape, reductions=reductions, profile=profile, link=link)
    medium = read_link(link)
    bandwidth = medium.payload_nbytes / medium.transfer_s
    return ClientSpeeds(report["time"]["sample_s"], bandwidth, bandwidth, latency, spread, variation)


def report_text(report: Mapping[str, Any]) -> str:
    """Return the Markdown text of a report that has the key ``recipes``. The tables are readable on a terminal."""
    jinja2 = require_package("jinja2", "writes device reports")
    template = jinja2.Template(read_text(Path(__file__).with_name("report.md")))
    text: str = template.render(report, table=markdown_table, seconds=_seconds)
    return text.rstrip("\n") + "\n"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _memory(footprint: Footprint) -> dict[str, Any]:
    """Return the ``memory`` section of a report in bytes: largest layers, stored inputs, content of RAM and flash."""
    learning = [layer for layer in footprint.layers if layer.trained]
    step = max(learning, key=lambda layer: layer.working, default=None)
    # Gradient descent also stores the gradient of M_T (the trained part). Methods such as FedProx use the server's M_T.
    copies = 0 if footprint.statistics else 2 * footprint.nbytes(True)
    model = footprint.nbytes(True) + footprint.nbytes(False)
    stored = sum(entry.nbytes for entry in footprint.entries if entry.name not in ("readout.A", "readout.B"))
    at_once = 0 if step is None else step.working if footprint.statistics else step.all_buffers
    return {
        "inference": _largest(footprint.layers, "activations"),
        "learning": {"bytes": step.working if step else 0, "layer": step.name if step else "", "at_once": at_once},
        "tcdm": _largest(footprint.layers, "working"),
        "kept": footprint.activation_nbytes,
        "ram": model + copies + footprint.activation_nbytes,
        "flash": stored if footprint.statistics else model,
    }


def _largest(layers: Sequence[Layer], field_name: str) -> dict[str, Any]:
    largest = max(layers, key=lambda layer: getattr(layer, field_name), default=None)
    return {"bytes": getattr(largest, field_name) if largest else 0, "layer": largest.name if largest else ""}


def _costs(
    footprint: Footprint, device: DeviceProfile, link: LinkProfile, samples: int, nodes: int, local_epochs: int
) -> dict[str, Any]:
    upload_bytes, download_bytes = (
        sum(getattr(entry, name) for entry in footprint.entries) for name in ("upload", "download")
    )
    epoch = device.seconds(samples * footprint.frozen_forward, samples * footprint.fp32_macs)
    transfers = link.transfer_time(upload_bytes) + link.transfer_time(download_bytes)
    sync, ad_hoc = nodes * transfers, (nodes - 1) * transfers
    return {
        "synchronisation": {
            "upload_bytes": upload_bytes,
            "download_bytes": download_bytes,
            "simulated_upload_bytes": footprint.simulated[0],
            "simulated_download_bytes": footprint.simulated[1],
            "upload_s": link.transfer_time(upload_bytes),
            "download_s": link.transfer_time(download_bytes),
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
        "energy_mj": device.power_mw * epoch,
    }
