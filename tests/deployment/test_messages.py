"""What has changed, and nothing else, travels: to the bit."""

import pytest
import torch

from lightning_fcl.deployment.messages import Parcel, RefusedError, decode_entry, encode_entry, opened, record_of

from .recipes import strategy

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (64, 3), (0, 3)])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_what_is_restored_is_what_was_sent(dtype, shape, share):
    start = torch.randn(shape).mul(3).to(dtype)
    state = torch.where(torch.rand(shape) < share, torch.randn(shape).mul(3).to(dtype), start)
    sent = encode_entry(state, start)
    found = decode_entry("w", sent, start)
    assert torch.equal(found, state) and found.dtype == dtype and len(sent) <= state.nbytes


def test_zeros_keep_their_sign_and_other_shapes_travel_whole():
    start, state = torch.zeros(40), torch.zeros(40)
    state[3] = -0.0
    assert decode_entry("w", encode_entry(state, start), start)[3].signbit()
    assert len(encode_entry(state, start)) == 5 + 4 and len(encode_entry(torch.zeros(50), start)) == 200


@pytest.mark.parametrize("made", [lambda b: b[:7], lambda b: b[:-1], lambda b: b + b"0000", lambda b: b"\xff" + b[1:]])
def test_bytes_that_do_not_fit_what_has_changed_are_refused(made):
    start = torch.zeros(64)
    with pytest.raises(RefusedError, match=r"torch.float32 of shape \(64,\), or what has changed of it, but got \d+ b"):
        decode_entry("w", made(encode_entry(torch.eye(8).flatten(), start)), start)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_message_is_opened_as_it_was_sent(dtype):
    """Also over Flower's own coding of arrays, of which some are empty."""
    state = {
        "w": torch.randn(7, 5).mul(3).to(dtype),
        "one": torch.ones((), dtype=dtype),
        "no": torch.ones(0, 3).to(dtype),
    }
    head = {"text": "a", "number": 2, "half": 0.5, "yes": True, "none": None, "nested": [{"lr": [0.1, None]}, []]}
    record = record_of(Parcel(head, state))
    for name, array in record.array_records["arrays"].items():
        again = type(array).inflate(array.deflate(), dict(array.slice_array()))
        assert (again.dtype, again.shape, again.data) == (array.dtype, array.shape, array.data), name
    found = opened(record)
    assert found.head == head and found.state.keys() == state.keys()
    assert all(torch.equal(value, state[name]) and value.dtype == dtype for name, value in found.state.items())


@pytest.mark.parametrize(
    ("text", "message"), [("[" * 100_000, "RecursionError"), ("{", "JSONDecodeError"), ("[1]", "TypeError|ValueError")]
)
def test_a_servers_text_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(RefusedError, match=f"Expected a message of the server that can be read but got ({message})"):
        opened(record_of(Parcel({"nested": text})))


@pytest.mark.parametrize("form", [("torch.save", (3,)), ("torch.float32", (-3, -1)), ("torch.float32", (2,))])
def test_a_servers_array_of_another_form_is_refused(form):
    record = record_of(Parcel({}, {"w": torch.zeros(3)}))
    array = record.array_records["arrays"]["w"]
    array.dtype, array.shape = form
    with pytest.raises(RefusedError, match="Expected `w` to be an array of numbers but got 12 bytes as torch"):
        opened(record)


@pytest.mark.seconds
def test_a_compressed_upload_is_short_on_the_wire(rehearsal, wire):
    top = {"class_path": "lightning_fcl.federation.wire.TopK", "init_args": {"fraction": 0.1}}
    one = rehearsal({"trainer": {"strategy": strategy(compression=top), "max_epochs": 1}})
    one.simulate()
    one.serve(wire(one.nodes()), clients_at_least=3)
    (round,) = one.rounds()
    assert all(round["upload_bytes"][client] < round["download_bytes"][client] / 5 for client in one.clients)
