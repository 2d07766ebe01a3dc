"""Tests that invalid answers of clients raise an error that names the client and the reason."""

import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lightning_fcl import __version__
from lightning_fcl.deployment.messages import Parcel, RejectedMessageError, sanitize_reason, to_tensor
from lightning_fcl.deployment.upload_validation import UploadLimits, parse_join_request

from .lies import HELLOS, KINDS, Message, numbers, read_upload, saying, server_with

BOUND = {"federation": "f" * 32, "round": 0, "message": "m" * 32}
LIMITS = UploadLimits(10**8, 12, 30, 1000.0)


def server_state(**more):
    torch.manual_seed(0)
    shapes = {"1.weight": (16, 64), "1.bias": (16,), "3.weight": (10, 16), "3.bias": (10,)}
    return {name: torch.randn(shape) / 4 for name, shape in shapes.items()} | more


def answer_to(state, rule="mean", **head):
    """Return an honest answer to a download, its tensors, and a function that reads an answer."""
    trained = {
        n: (v + torch.randn(v.shape) / 50 if v.is_floating_point() else v + 1).to(v.dtype) for n, v in state.items()
    }
    said = {"client": "1", **BOUND, "samples": 12, "rehearsed": 30, "diverged": False, **head}
    server = server_with(state, rule)

    def read(message, limits=LIMITS):
        return read_upload(message, BOUND, "1", server, limits)

    return Message.of(Parcel(said, trained)), trained, read


def test_read_upload_honest_answer_is_bitwise_identical():
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    more = {str(kind): torch.ones(5, 3).to(kind) for kind in kinds} | {
        "single": torch.tensor(2.0),
        "no": torch.ones(0, 3),
    }
    message, trained, read = answer_to(server_state(**more))
    upload = read(message)
    assert (upload.samples, upload.rehearsed, upload.diverged) == (12, 30, False)
    assert upload.state.keys() == trained.keys()
    assert all(
        torch.equal(value, trained[name]) and value.dtype == trained[name].dtype for name, value in upload.state.items()
    )
    assert read(saying(samples=0)(message)).samples == 0


def test_upload_above_max_samples_is_read_with_larger_limit():
    honest, _, read = answer_to(server_state())
    more = saying(samples=13)(honest)
    with pytest.raises(
        RejectedMessageError, match=r"from 0 to 12, but got 13[.] If the client has more samples, set `max-samples`"
    ):
        read(more)
    assert read(more, replace(LIMITS, max_samples=13)).samples == 13


@pytest.mark.parametrize("kind", KINDS)
def test_read_upload_invalid_answer_raises_with_reason(kind):
    change, message = KINDS[kind]
    honest, _, read = answer_to(server_state())
    with pytest.raises(RejectedMessageError, match=message) as refused:
        read(change(honest))
    said = str(refused.value)
    assert len(said) <= 500 and said.isprintable()


@pytest.mark.parametrize("kind", [kind for kind in HELLOS if "is there" not in kind and "of the run" not in kind])
def test_join_request_invalid_has_reason(kind):
    change, message = HELLOS[kind]
    honest = Message.of(Parcel({"client": "1", "version": __version__, "recipe": "r", "samples": 12, "held": ""}))
    found = parse_join_request(change(honest).record(), "r")
    assert re.search(message, found.error) and len(found.error) <= 500 and found.error.isprintable()


def test_upload_near_float32_maximum_raises_for_each_reduction():
    """The limit is the same for every reduction, because Krum and server optimizers compute sums of squares."""
    for rule in ("mean", "sum", "sparse_mean", "median", "krum"):
        honest, _, read = answer_to(server_state(), rule)
        read(honest)
        with pytest.raises(RejectedMessageError, match="Sums of such updates can overflow"):
            read(numbers(lambda v: np.full_like(v, 3e38))(honest))
    honest, _, read = answer_to({"count": torch.tensor([5])})
    read(honest)
    far = Parcel({**honest.head}, {"count": torch.tensor([2**62])})
    with pytest.raises(RejectedMessageError, match="Sums of such updates can overflow"):
        read(Message.of(far))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16])
def test_upload_narrow_type_raises_if_sum_would_overflow(kind):
    """One upload is rejected if the sum over all clients can exceed the largest value of the type."""
    largest = float(torch.finfo(kind).max if kind.is_floating_point else torch.iinfo(kind).max)
    honest, _, read = answer_to({"count": torch.tensor([3, 4]).to(kind)}, "sum")
    read(Message.of(Parcel(honest.head, {"count": torch.tensor([0, 9]).to(kind)})), replace(LIMITS, num_clients=3))
    third = torch.tensor([0, largest / 3 * 1.01], dtype=torch.float64).to(kind)
    with pytest.raises(
        RejectedMessageError, match=r"small enough for a sum of 3 clients|Sums of such updates can overflow"
    ):
        read(Message.of(Parcel(honest.head, {"count": third})), replace(LIMITS, num_clients=3))


def test_upload_ignores_large_and_non_finite_server_values():
    masks = {
        "mask": torch.tensor([0.0, -torch.inf, torch.nan]),
        "lowest": torch.full((4,), torch.finfo(torch.float32).min),
    }
    state = server_state(**masks)
    honest, _, read = answer_to({name: value for name, value in state.items() if name not in masks})
    _, _, read = answer_to(state)
    sent = Parcel(honest.head, {**state, "1.bias": state["1.bias"] + 1})
    found = read(Message.of(sent)).state
    assert torch.equal(found["lowest"], masks["lowest"]) and torch.equal(found["1.bias"], state["1.bias"] + 1)


def test_max_update_norm_uses_averaged_floating_point_tensors():
    honest, _, read = answer_to(server_state(steps=torch.tensor(0)))
    large = numbers(lambda v: v * 100)(honest)
    read(large, UploadLimits(10**8, 12, 30, 1000.0))
    with pytest.raises(RejectedMessageError, match=r"at most 0\.5 times the larger of 1 and the norm of .*, but got 9"):
        read(large, UploadLimits(10**8, 12, 30, 0.5))
    # The norm of the server's tensors is below 1, so the limit is relative to 1.
    small = {"w": torch.zeros(4)}
    honest, _, read = answer_to(small)
    read(Message.of(Parcel(honest.head, {"w": torch.full((4,), 0.4)})), UploadLimits(10**8, 12, 30, 1.0))
    _, _, read = answer_to(small, "sum")
    read(Message.of(Parcel(honest.head, {"w": torch.full((4,), 1e6)})), UploadLimits(10**8, 12, 30, 1.0))


def test_read_upload_unexpected_error_becomes_rejection(monkeypatch):
    """Memory, recursion, overflow, Unicode and key errors also become a RejectedMessageError."""
    honest, _, read = answer_to(server_state())
    for error in (
        MemoryError(),
        RecursionError("deep"),
        OverflowError("long"),
        UnicodeError("odd"),
        KeyError("\ud800"),
    ):
        monkeypatch.setattr("lightning_fcl.deployment.upload_validation.tensors_of", Mock(side_effect=error))
        with pytest.raises(
            RejectedMessageError, match=f"Expected a readable message from client 1, but got {type(error).__name__}"
        ):
            read(honest)


def test_to_tensor_invalid_boolean_byte_raises():
    assert to_tensor("w", b"\0\1\0", "torch.bool", (3,)).tolist() == [False, True, False]
    with pytest.raises(RejectedMessageError, match="to be 0 or 1"):
        to_tensor("w", b"\0\1\2", "torch.bool", (3,))


def test_sanitize_reason_returns_one_printable_line():
    assert sanitize_reason("x" * 500) == "x" * 500
    assert sanitize_reason("x" * 501) == "x" * 497 + "..."
    assert sanitize_reason("a\nb\x00\ud800\u202e") == "a b   "
    assert parse_join_request("y" * 10**6, "").error == sanitize_reason("y" * 501)
