"""The speeds of a federation of one kind of device."""

import pytest

from lightning_fcl.edge.report import device_report, device_speeds
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.models import MLP, DSICNet


@pytest.mark.parametrize("reductions", [{}, {"backbone.*": "constant"}])
def test_a_client_takes_the_time_that_the_device_is_estimated_to_take(reductions):
    """An epoch and both ways of a synchronisation, of the node on its own."""
    model, shape = DSICNet(num_classes=10), (1, 64, 48)
    report = device_report(model, shape, reductions=reductions, samples=28)
    speeds = device_speeds(model, shape, reductions=reductions)
    sent = report["synchronisation"]
    seconds = speeds.seconds("node1", 0, 0, 28, sent["download_bytes"], sent["upload_bytes"])
    expected = report["time"]["local_epoch_s"] + sent["download_s"] + sent["upload_s"]
    assert seconds == pytest.approx(expected, rel=1e-9)


def test_unlike_devices_differ_and_wait():
    speeds = device_speeds(MLP([6, 5, 4]), (6,), latency=2.0, spread=0.5, variation=0.1)
    assert speeds.for_client("a", 0) != speeds.for_client("b", 0)
    assert (speeds.typical.latency, speeds.spread, speeds.variation) == (2.0, 0.5, 0.1)


def test_a_device_that_is_not_known_is_named():
    with pytest.raises(UnknownNameError, check=lambda error: error.argument == "profile"):
        device_speeds(MLP([6, 5, 4]), (6,), profile="gap8")
