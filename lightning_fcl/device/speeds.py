"""How fast a federation of one kind of device is, from what was measured on it and what a module needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lightning_fcl.device.profiles import read_link
from lightning_fcl.device.report import device_report
from lightning_fcl.federation.aggregation import Rules
from lightning_fcl.federation.speeds import Speeds


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
