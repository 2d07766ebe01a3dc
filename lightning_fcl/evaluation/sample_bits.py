"""Correctness of the predictions of single test samples, stored as text: one bit for each sample."""

from __future__ import annotations

import base64
import binascii

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_fcl.errors import DamagedFileError, InvalidValueError


def encode_bits(bits: ArrayLike) -> str:
    """Return booleans as text: the base64 text of eight booleans per byte, the first one in the highest bit.

    Args:
        bits: Booleans, shape (n,). The numbers 0 and 1 are also accepted.

    Raises:
        InvalidValueError: If the array does not have one dimension, or contains other values.

    Example:
        >>> encode_bits([True, False, False, False, False, False, False, True, True])
        'gYA='
    """
    array = np.asarray(bits)
    if array.ndim != 1:
        raise InvalidValueError(
            f"Expected `bits` to have one dimension, but got shape {array.shape}.", argument="bits", value=array.shape
        )
    # An empty list has the type float.
    booleans = array.astype(np.bool_)
    if not np.array_equal(booleans, array):
        other = array[booleans != array][0]
        raise InvalidValueError(
            f"Expected `bits` to contain booleans, but got {other}.", argument="bits", value=other.item()
        )
    return base64.b64encode(np.packbits(booleans).tobytes()).decode("ascii")


def decode_bits(text: str, n: int) -> NDArray[np.bool_]:
    """Return the booleans that `encode_bits` has encoded, shape (n,).

    Args:
        text: Text of `encode_bits`.
        n: Number of booleans.

    Raises:
        DamagedFileError: If the text is no base64 text, or if the text is not of ``n`` booleans.

    Example:
        >>> decode_bits("gYA=", 9).nonzero()[0].tolist()
        [0, 7, 8]
    """
    try:
        data = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except (binascii.Error, ValueError) as error:
        raise DamagedFileError(f"Expected `text` to be base64 text, but got {text!r:.40}.", argument="text") from error
    bits = np.unpackbits(data).astype(np.bool_)
    # The last byte is padded with zeros.
    if len(data) != -(-n // 8) or bits[n:].any():
        raise DamagedFileError(
            f"Expected `text` to contain {n} booleans, but got {len(data)} bytes"
            f"{' with a bit after the last boolean' if len(data) == -(-n // 8) else ''}.",
            argument="text",
        )
    return bits[:n]
