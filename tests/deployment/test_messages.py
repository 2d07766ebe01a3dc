"""What has changed, and nothing else, travels: to the bit."""

import pytest
import torch

from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.deployment.messages import RefusedError, changes, restored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (64, 3)])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_what_is_restored_is_what_was_sent(dtype, shape, share):
    start = torch.randn(shape).mul(3).to(dtype)
    state = torch.where(torch.rand(shape) < share, torch.randn(shape).mul(3).to(dtype), start)
    sent = changes({"w": state}, {"w": start})
    assert torch.equal(restored(sent, {"w": start})["w"], state)
    assert sum(value.nbytes for value in sent.values()) <= max(state.nbytes, 1)


def test_zeros_keep_their_sign_and_other_shapes_travel_whole():
    start, state = torch.zeros(40), torch.zeros(40)
    state[3] = -0.0
    assert restored(changes({"w": state}, {"w": start}), {"w": start})["w"][3].signbit()
    longer = {"w": torch.zeros(50)}
    assert changes(longer, {"w": start}).keys() == {"w"}


@pytest.mark.parametrize(("part", "other"), [("w|values", torch.ones(3)), ("w|changed", torch.ones(4).byte())])
def test_a_part_that_does_not_fit_is_refused(part, other):
    start = {"w": torch.zeros(64)}
    sent = changes({"w": torch.eye(8).flatten()}, start) | {part: other}
    with pytest.raises(RefusedError, match="changed of `w` to fit its 64 numbers"):
        restored(sent, start)


@pytest.mark.seconds
def test_a_compressed_upload_is_short_on_the_wire(rehearsal, wire):
    top = {"class_path": "lightning_fcl.federation.compression.TopK", "init_args": {"fraction": 0.1}}
    strategy = {"class_path": "lightning_fcl.FederatedStrategy", "init_args": {"cohort_size": 1, "compression": top}}
    one = rehearsal({"trainer": {"strategy": strategy, "max_epochs": 1}})
    one.simulate()
    deployed = one.serve(wire([one.node(client) for client in one.clients]), clients_at_least=3)
    record = next(each for each in deployed.trainer.callbacks if isinstance(each, ContinualMetrics)).record
    (round,) = record["rounds"]
    assert all(round["upload_bytes"][client] < round["download_bytes"][client] / 5 for client in one.clients)
