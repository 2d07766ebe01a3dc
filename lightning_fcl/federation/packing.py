"""Packing: lossless conversion of tensors to fewer bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fcl.errors import InvalidValueError


def pack_nonzero(value: Tensor) -> Tensor:
    """Return the nonzero elements of a tensor as bytes. Return the tensor unchanged if the bytes would not be shorter.

    The bytes start with one bit for each element of the tensor. The bit is 1 if the element is not zero.

    Example:
        >>> value = torch.tensor([0.0] * 15 + [1.0])
        >>> packed = pack_nonzero(value)
        >>> packed.nbytes, torch.equal(unpack_nonzero(packed, value), value)
        (6, True)
    """
    nonzero = value != 0
    size = -(-value.numel() // 8) + int(nonzero.count_nonzero()) * value.element_size()
    if size >= value.nbytes:
        return value
    mask = torch.from_numpy(np.packbits(nonzero.cpu().numpy(), axis=None, bitorder="little"))
    return torch.cat([mask, _bytes_of(value[nonzero].cpu())])


def unpack_nonzero(packed: Tensor, reference: Tensor) -> Tensor:
    """Return the tensor that was passed to `pack_nonzero`, with the shape, dtype and device of ``reference``.

    Raises:
        InvalidValueError: If the bytes do not represent a tensor with this shape and dtype.
    """
    if packed.dtype == reference.dtype and packed.shape == reference.shape:
        return packed
    size = -(-reference.numel() // 8)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) < size:
        raise _unreadable(packed, reference)
    nonzero = unpack_mask(packed[:size], reference.numel())
    number = int(nonzero.count_nonzero())
    if len(packed) != size + number * reference.element_size() or bool(
        unpack_mask(packed[:size], 8 * size)[reference.numel() :].any()
    ):
        raise _unreadable(packed, reference)
    value = torch.zeros(reference.numel(), dtype=reference.dtype)
    value[nonzero] = packed[size:].cpu().clone().view(reference.dtype)
    return value.view(reference.shape).to(reference.device)


def pack_mask(mask: Tensor) -> Tensor:
    """Return booleans, shape (..., n), as bits, shape (..., ceil(n / 8))."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little")).to(mask.device)


def unpack_mask(packed: Tensor, n: int) -> Tensor:
    """Return the booleans that were passed to `pack_mask`, shape (..., n)."""
    bits = np.unpackbits(packed.cpu().numpy(), axis=-1, count=n, bitorder="little")
    return torch.from_numpy(bits.astype(bool)).to(packed.device)


def pack_integers(values: Tensor, bits: int) -> Tensor:
    """Return integers from 0 to ``2^bits - 1``, shape (clients, n), as bytes, shape (clients, ceil(n * bits / 8)).

    Example:
        >>> packed = pack_integers(torch.tensor([[5, 0, 7]]), bits=3)
        >>> packed.shape, unpack_integers(packed, 3, bits=3)
        (torch.Size([1, 2]), tensor([[5, 0, 7]], dtype=torch.int32))
    """
    numbers = values.cpu().numpy().astype(np.uint16)
    if bits == 8:
        packed: NDArray[np.uint8] = numbers.astype(np.uint8)
    else:
        bit_values = (numbers[..., None] >> np.arange(bits, dtype=np.uint16)).astype(np.uint8) & 1
        packed = np.packbits(bit_values.reshape(len(numbers), -1), axis=1, bitorder="little")
    return torch.from_numpy(packed).to(values.device)


def unpack_integers(packed: Tensor, n: int, bits: int) -> Tensor:
    """Return the integers that were passed to `pack_integers`, shape (clients, n)."""
    packed_array = packed.cpu().numpy()
    if bits == 8:
        numbers = packed_array.astype(np.int32)
    else:
        bit_values = np.unpackbits(packed_array, axis=1, count=n * bits, bitorder="little").reshape(
            len(packed_array), n, bits
        )
        numbers = (bit_values.astype(np.int32) << np.arange(bits, dtype=np.int32)).sum(axis=2, dtype=np.int32)
    return torch.from_numpy(numbers).to(packed.device)


def _bytes_of(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)


def _unreadable(packed: Tensor, reference: Tensor) -> InvalidValueError:
    return InvalidValueError(
        f"Expected the nonzero elements of a tensor of {reference.dtype} and shape {tuple(reference.shape)} as bytes, "
        f"but got invalid data: {packed.dtype} of shape {tuple(packed.shape)}."
    )
