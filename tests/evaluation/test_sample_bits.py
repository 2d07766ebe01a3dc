"""Tests of the text that stores the correctness of single predictions."""

import base64

import numpy as np
import pytest
from raising import raises

from lightning_fcl.errors import DamagedFileError, InvalidValueError
from lightning_fcl.evaluation.sample_bits import decode_bits, encode_bits


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 5000])
def test_decode_bits_inverts_encode_bits(n):
    bits = np.random.default_rng(n).random(n) < 0.4
    found = decode_bits(encode_bits(bits), n)
    assert found.dtype == np.bool_ and np.array_equal(found, bits)
    assert encode_bits(bits.astype(np.int64)) == encode_bits(bits.tolist()) == encode_bits(bits)


def test_encode_bits_writes_first_sample_to_highest_bit():
    bits = [0, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    text = "".join(map(str, bits)).ljust(16, "0")
    expected = base64.b64encode(bytes(int(text[start : start + 8], 2) for start in (0, 8))).decode()
    assert encode_bits(np.array(bits, dtype=bool)) == expected


@pytest.mark.parametrize("bits", [[[True]], True, [0.5], [2, 0]])
def test_encode_bits_rejects_other_arrays(bits):
    with raises(InvalidValueError, "bits"):
        encode_bits(bits)


@pytest.mark.parametrize(("text", "n"), [("gYA=", 8), ("gYA=", 17), ("gYE=", 9), ("gY", 8), ("é", 1), ("*", 1)])
def test_decode_bits_rejects_damaged_text(text, n):
    with raises(DamagedFileError, "text"):
        decode_bits(text, n)
