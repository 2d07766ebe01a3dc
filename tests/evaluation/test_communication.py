"""Tests of the volume and time of the communication, compared with sums that are computed by hand."""

import numpy as np
import pytest
from raising import raises

from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.summary import BANDWIDTHS, communication_time, communication_volumes
from lightning_fcl.federation.compression import TopK

RECORD = {
    "rounds": [
        {"upload_bytes": {"a": 10, "b": 40}, "download_bytes": {"a": 100, "b": 60}},
        # The upload of client b was dropped.
        {"upload_bytes": {"a": 10}, "download_bytes": {"a": 10, "b": 50}},
        {"upload_bytes": {}, "download_bytes": {}},
        {"upload_bytes": {"a": 0}},
    ]
}


def test_communication_volumes_and_time_equal_sums_by_hand():
    np.testing.assert_array_equal(communication_volumes(RECORD), [[50, 10, 0, 0], [160, 60, 0, 0]])
    times = [communication_time({"rounds": [entry]}, 10) for entry in RECORD["rounds"]]
    np.testing.assert_allclose([*times, communication_time(RECORD, 10)], [11, 5, 0, 0, 16])
    assert communication_time({"rounds": []}, 10) == 0 and communication_volumes({"rounds": []}).shape == (2, 0)


def test_communication_volumes_of_a_fit_count_compressed_uploads(fit, make_stream, make_task):
    times = {}
    for code in (None, TopK(0.1)):
        metrics, task = ContinualMetrics(), make_task()
        fit(task, make_stream(), [metrics], compression=code, participation=2)
        down = sum(value.nbytes for value in task.state_dict().values())
        up = sum(code.nbytes(p.numel(), 4) for p in task.parameters()) if code else down
        np.testing.assert_array_equal(communication_volumes(metrics.record), [[2 * up] * 2, [2 * down] * 2])
        assert communication_time(metrics.record, 1e5) == pytest.approx(2 * (up + down) / 1e5)
        times[code] = communication_time(metrics.record, BANDWIDTHS[0])
    assert times[code] < 0.7 * times[None]
    assert (BANDWIDTHS[0], len(BANDWIDTHS), BANDWIDTHS[-1]) == (1e5, 6, 1e7)


@pytest.mark.parametrize("bandwidth", [0, -1, float("nan"), float("inf")])
def test_communication_time_invalid_bandwidth_raises(bandwidth):
    with raises(InvalidValueError, "bandwidth"):
        communication_time(RECORD, bandwidth)
