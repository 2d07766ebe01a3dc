"""What a microcontroller would need to train a module in a federation, estimated without training.

What is counted, and in which units, is said in `footprint` and `trace` beside this module; what was measured on which
device, and what is assumed to carry it over to other models, in profiles.yaml. M_F is computed anew for each sample and
epoch. Not counted are the passes and the memory of callbacks (a teacher's forward pass, a replay buffer), the data, the
inputs that skip connections keep, and the program itself.
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
# Of the paper's setting, where neither the recipe nor the caller says: images of a person, and drones in a swarm.
SAMPLES = 28
NUM_NODES = 3


@dataclass(frozen=True)
class DeviceProfile:
    """A microcontroller at one operating point, and one local epoch that was measured on it.

    One measurement gives one number, so the ratio of the two rates is an assumption, ``int8_per_fp32``. The rates are
    then those with which the model of the measurement takes the time that was measured: its own time is reproduced by
    construction, any other model's is an estimate.

    Args:
        power_mw: Power while it learns, in mW.
        samples_per_run: Samples of the local epoch that was measured.
        latency_ms: Time of that epoch, in ms.
        int8_macs: MACs of one of its samples in int8: the forward pass of the frozen part.
        fp32_macs: MACs of one of its samples in fp32: forward and backward pass of the trained part.
        int8_per_fp32: int8 MACs that take the time of one fp32 MAC.
        memory: Sizes of the memories in bytes: ``tcdm``, ``ram``, ``flash``, or some of these.
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
        """Effective fp32 MACs per second."""
        return self.samples_per_run * (self.int8_macs / self.int8_per_fp32 + self.fp32_macs) / (self.latency_ms / 1000)

    @property
    def int8_rate(self) -> float:
        """Effective int8 MACs per second."""
        return self.int8_per_fp32 * self.fp32_rate

    def seconds(self, int8_macs: float, fp32_macs: float) -> float:
        """Time of so many MACs, in s."""
        return int8_macs / self.int8_rate + fp32_macs / self.fp32_rate


@dataclass(frozen=True)
class LinkProfile:
    """A shared medium over which one node sends at a time, and one transfer of some bytes that was measured on it."""

    name: str
    payload_nbytes: int
    transfer_s: float
    description: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        validate_fields(self)
        above(0, payload_nbytes=self.payload_nbytes, transfer_s=self.transfer_s)

    def transfer_time(self, size: int) -> float:
        """Time of a transfer of so many bytes, in s, in proportion to the one that was measured."""
        return self.transfer_s * size / self.payload_nbytes


Profile = TypeVar("Profile", DeviceProfile, LinkProfile)


def read_device(name: str | Path) -> DeviceProfile:
    """A device of profiles.yaml, or of a YAML file of your own with the same keys."""
    return _read(DeviceProfile, str(name), "devices", "profile")


def read_link(name: str | Path) -> LinkProfile:
    """A link of profiles.yaml, or of a YAML file of your own with the same keys."""
    return _read(LinkProfile, str(name), "links", "link")


def _read(kind: type[Profile], name: str, section: str, option: str) -> Profile:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return parse_dataclass(kind, read_yaml(path), path, name=path.stem)
    profiles = read_yaml(PROFILES_FILE)[section]
    if name not in profiles:
        raise UnknownNameError(
            f"Expected `{option}` to be one of {', '.join(profiles)}, or a YAML file of your own, but got {name}.",
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
    """What a microcontroller would need to train a module in a federation.

    Args:
        module: A LightningModule, or any module that maps a batch of samples to outputs.
        input_shape: Shape of a sample, without the batch.
        reductions: Pattern of state entries -> reduction, as `FederatedStrategy` takes them: ``{"model.backbone.*":
            "constant"}`` freezes the backbone.
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
        >>> report = device_report(DSICNet(num_classes=10), (1, 64, 48), reductions={"backbone.*": "constant"})
        >>> report["parameters"]["trained"], report["synchronisation"]["upload_bytes"]
        (6010, 24040)
        >>> round(report["time"]["local_epoch_s"], 4), round(report["time"]["federated_epoch_s"], 1)
        (0.1784, 10.4)
    """
    at_least(1, samples=samples, nodes=nodes, local_epochs=local_epochs)
    if not input_shape or min(input_shape) < 1:
        raise InvalidValueError(
            f"Expected `input_shape` of sizes of at least 1 but got {tuple(input_shape)}.", argument="input_shape"
        )
    device, medium = read_device(profile), read_link(link)
    footprint = measure_footprint(module, input_shape, reductions)
    memory = _memory(footprint)
    trained, frozen = footprint.num_elements(True), footprint.num_elements(False)
    mixed = {"trained": footprint.nbytes(True), "frozen": footprint.nbytes(False)}
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
    reductions: ReductionRules | None = None,
    profile: str | Path = "gap9-lpm",
    link: str | Path = "uwb-loco",
    latency: float = 0.0,
    spread: float = 0.0,
    variation: float = 0.0,
) -> ClientSpeeds:
    """The speeds of clients that are all such devices, each with a link of its own: an estimate, as `device_report` is.

    Module, shape, reductions, profile and link are as there; latency (s), spread and variation as `ClientSpeeds` takes
    them.

    Raises:
        ValueError: If an argument is out of range, or the module does not take such samples.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> speeds = device_speeds(DSICNet(num_classes=10), (1, 64, 48), reductions={"backbone.*": "constant"})
        >>> round(28 * speeds.typical.seconds_per_sample, 4)  # an epoch that was measured
        0.1784
        >>> round(speeds.typical.upload_bandwidth)  # bytes per second
        14141
    """
    report = device_report(module, input_shape, reductions=reductions, profile=profile, link=link)
    medium = read_link(link)
    bandwidth = medium.payload_nbytes / medium.transfer_s
    return ClientSpeeds(report["time"]["sample_s"], bandwidth, bandwidth, latency, spread, variation)


def report_text(report: Mapping[str, Any]) -> str:
    """A report, with the ``recipes`` that it is of, in Markdown tables that a terminal shows well, too."""
    jinja2 = require_package("jinja2", "writes device reports")
    template = jinja2.Template(read_text(Path(__file__).with_name("report.md")))
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
