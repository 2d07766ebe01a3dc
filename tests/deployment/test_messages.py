"""Tests that undamaged messages are read without changes, and that damaged messages are rejected."""

import pytest
import torch

from lightning_fcl.deployment.messages import Parcel, RejectedMessageError, to_record, unpack

from .recipes import strategy

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", KINDS)
def test_unpack_returns_sent_parcel(dtype):
    """Flower encodes and decodes the arrays. One of the arrays is empty."""
    state = {
        "w": torch.randn(7, 5).mul(3).to(dtype),
        "one": torch.ones((), dtype=dtype),
        "no": torch.ones(0, 3).to(dtype),
    }
    head = {"text": "a", "number": 2, "half": 0.5, "yes": True, "none": None, "nested": [{"lr": [0.1, None]}, []]}
    record = to_record(Parcel(head, state))
    for name, array in record.array_records["arrays"].items():
        again = type(array).inflate(array.deflate(), dict(array.slice_array()))
        assert (again.dtype, again.shape, again.data) == (array.dtype, array.shape, array.data), name
    found = unpack(record)
    assert found.header == head and found.state.keys() == state.keys()
    assert all(torch.equal(value, state[name]) and value.dtype == dtype for name, value in found.state.items())


@pytest.mark.parametrize(
    ("text", "message"), [("[" * 100_000, "RecursionError"), ("{", "JSONDecodeError"), ("[1]", "TypeError|ValueError")]
)
def test_unpack_invalid_nested_text_raises(text, message):
    with pytest.raises(RejectedMessageError, match=f"Expected a readable message from the server, but got ({message})"):
        unpack(to_record(Parcel({"nested": text})))


@pytest.mark.parametrize("form", [("torch.save", (3,)), ("torch.float32", (-3, -1)), ("torch.float32", (2,))])
def test_unpack_array_of_wrong_type_or_shape_raises(form):
    record = to_record(Parcel({}, {"w": torch.zeros(3)}))
    array = record.array_records["arrays"]["w"]
    array.dtype, array.shape = form
    with pytest.raises(
        RejectedMessageError, match=r"Expected `w` to have a supported type, .*, but got 12 bytes of type torch"
    ):
        unpack(record)


@pytest.mark.seconds
def test_compressed_upload_needs_fewer_bytes(rehearsal, wire):
    top = {"class_path": "lightning_fcl.federation.compression.TopK", "init_args": {"fraction": 0.1}}
    one = rehearsal({"trainer": {"strategy": strategy(compression=top), "max_epochs": 1}})
    one.simulate()
    one.serve(wire(one.nodes()), min_clients=3)
    (round_idx,) = one.rounds()
    assert all(round_idx["upload_bytes"][client] < round_idx["download_bytes"][client] / 5 for client in one.clients)
