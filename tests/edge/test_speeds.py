"""Tests of the simulated speeds of clients that run on the same type of device."""

import pytest

from lightning_fcl.edge.report import device_report, device_speeds
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.models import MLP, DSICNet


@pytest.mark.parametrize("reductions", [{}, {"backbone.*": "constant"}])
def test_device_speeds_client_time_equals_device_report(reductions):
    """The time of a single node is the sum of one epoch, one upload and one download."""
    model, shape = DSICNet(num_classes=10), (1, 64, 48)
    report = device_report(model, shape, reductions=reductions, samples=28)
    speeds = device_speeds(model, shape, reductions=reductions)
    sent = report["synchronisation"]
    seconds = speeds.seconds("node1", 0, 0, 28, sent["download_bytes"], sent["upload_bytes"])
    expected = report["time"]["local_epoch_s"] + sent["download_s"] + sent["upload_s"]
    assert seconds == pytest.approx(expected, rel=1e-9)


def test_device_speeds_latency_and_spread_are_used():
    speeds = device_speeds(MLP([6, 5, 4]), (6,), latency=2.0, spread=0.5, variation=0.1)
    assert speeds.for_client("a", 0) != speeds.for_client("b", 0)
    assert (speeds.typical.latency, speeds.spread, speeds.variation) == (2.0, 0.5, 0.1)


def test_device_speeds_unknown_profile_raises():
    with pytest.raises(UnknownNameError, check=lambda error: error.argument == "profile"):
        device_speeds(MLP([6, 5, 4]), (6,), profile="gap8")
