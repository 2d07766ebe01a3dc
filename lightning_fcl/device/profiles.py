"""Devices and links as data, profiles.yaml: what was measured once, and other models are estimated from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lightning_fcl.errors import above, at_least, did_you_mean, one_of
from lightning_fcl.hub.documents import parse, read_yaml

SHIPPED = Path(__file__).with_name("profiles.yaml")


@dataclass(frozen=True)
class Device:
    """A microcontroller at one operating point, and one local epoch that was measured on it.

    One measurement gives one number, so the ratio of the two rates is an assumption, ``int8_per_fp32``. The rates are
    then those with which the model of the measurement takes the time that was measured: its own time is reproduced by
    construction, any other model's is an estimate.

    Args:
        power_mw: Power while it learns, in mW.
        samples: Samples of the local epoch that was measured.
        latency_ms: Time of that epoch, in ms.
        int8_macs: MACs of one of its samples in int8: the forward pass of the frozen part.
        fp32_macs: MACs of one of its samples in fp32: forward and backward pass of the trained part.
        int8_per_fp32: int8 MACs that take the time of one fp32 MAC.
        memory: Sizes of the memories in bytes: ``tcdm``, ``ram``, ``flash``, or some of these.
    """

    name: str
    power_mw: float
    samples: int
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
        numbers = {
            name: vars(self)[name] for name in ("power_mw", "samples", "latency_ms", "fp32_macs", "int8_per_fp32")
        }
        above(0, **numbers, **self.memory)
        at_least(0, int8_macs=self.int8_macs)
        for name in self.memory:
            one_of(("tcdm", "ram", "flash"), memory=name)

    @property
    def fp32_rate(self) -> float:
        """Effective fp32 MACs per second."""
        return self.samples * (self.int8_macs / self.int8_per_fp32 + self.fp32_macs) / (self.latency_ms / 1000)

    @property
    def int8_rate(self) -> float:
        """Effective int8 MACs per second."""
        return self.int8_per_fp32 * self.fp32_rate

    def seconds(self, int8_macs: float, fp32_macs: float) -> float:
        """Time of so many MACs, in s."""
        return int8_macs / self.int8_rate + fp32_macs / self.fp32_rate

    def millijoules(self, seconds: float) -> float:
        """Energy of so many seconds of learning, in mJ: power x time."""
        return self.power_mw * seconds


@dataclass(frozen=True)
class Medium:
    """A shared medium over which one node sends at a time, and one transfer of some bytes that was measured on it."""

    name: str
    bytes: int
    seconds: float
    description: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        above(0, bytes=self.bytes, seconds=self.seconds)

    def time(self, size: int) -> float:
        """Time of a transfer of so many bytes, in s, in proportion to the one that was measured."""
        return self.seconds * size / self.bytes


Profile = TypeVar("Profile", Device, Medium)


def read_device(name: str | Path) -> Device:
    """A device of profiles.yaml, or of a YAML file of your own with the same keys."""
    return _read(Device, str(name), "devices", "profile")


def read_link(name: str | Path) -> Medium:
    """A link of profiles.yaml, or of a YAML file of your own with the same keys."""
    return _read(Medium, str(name), "links", "link")


def _read(kind: type[Profile], name: str, section: str, option: str) -> Profile:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return parse(kind, read_yaml(path), path, name=path.stem)
    known = read_yaml(SHIPPED)[section]
    if name not in known:
        raise ValueError(
            f"Expected `{option}` to be one of {', '.join(known)}, or a YAML file of your own, but got "
            f"{name}.{did_you_mean(name, known)}"
        )
    return parse(kind, known[name], f"{name} of {SHIPPED.name}", name=name)
