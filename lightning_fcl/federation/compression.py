"""Compression of uploads with error feedback.

A client's *update* of an entry is the client's value minus the value at the start of the round, plus the residual of
earlier rounds. The client sends the encoded update, and the server decodes it. The *residual* is the update minus the
decoded update. The client stores the residual (Seide et al., 2014; Stich et al., 2018, "Sparsified SGD with memory",
Algorithm 1). Therefore, over all rounds, the sum of a client's decoded updates differs from the sum of the client's
changes only by the last residual.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import State
from lightning_fcl.federation.packing import pack_integers, pack_mask, unpack_integers, unpack_mask
from lightning_fcl.federation.uploads import Code, Forms, Setting, UpdateCodec, Uploads
from lightning_fcl.validation import check_arguments

DIVERGENCE_HINT = (
    "Lower the learning rate, or a method's strength, or clip gradients (`gradient_clip_val` of the Trainer)."
)
"""Hint for messages about non-finite numbers."""

RESIDUAL = "residual"
"""Section of a client's state with the residuals of compression."""


class Compression(UpdateCodec, ABC):
    """Lossy compression of updates with error feedback. Each entry is compressed separately.

    A trainable parameter is compressed if the encoded update is shorter than the parameter. The reduction of each
    trainable parameter must be ``compressible``. Buffers are sent uncompressed, because a residual could make a
    variance negative. A subclass defines the encoding.
    """

    keeps_state = True

    @abstractmethod
    def compress(self, updates: Tensor) -> State:
        """Return the encoded updates of several clients. ``updates`` has shape (clients, n)."""

    def should_compress(self, value: Tensor) -> bool:
        """Return whether the encoded update of a tensor is shorter than the tensor."""
        return self.nbytes(value.numel(), value.element_size()) < value.nbytes

    def codes(self, name: str, setting: Setting) -> bool:
        return name in setting.trainable and self.should_compress(setting.state[name])

    def setup(self, setting: Setting) -> None:
        for name in setting.trainable:
            if not setting.reductions[name].compressible:
                raise InvalidValueError(
                    f"Expected a reduction that supports compression, such as `mean`, for the parameter `{name}`, but "
                    f"got `{setting.reductions[name]}`.",
                    hint="Use another reduction, or remove `compression`.",
                    argument="compression",
                    value=name,
                )
        self._setting = setting

    def encode(self, uploads: Uploads) -> None:
        previous_residuals = [kept.get(RESIDUAL, {}) for kept in uploads.kept]
        uploads.memories[RESIDUAL] = updated_residuals = [dict(residual) for residual in previous_residuals]
        for name in [name for name in uploads.values if self.codes(name, self._setting)]:
            update = uploads.update(name)
            if uploads.are_updates:
                update = update.clone()
            for row, residual in zip(update, previous_residuals, strict=True):
                if name in residual and residual[name].shape == row.shape:
                    row += residual[name].to(row.device)
            code = Code(self, self.compress(update.reshape(len(update), -1)), update[0])
            del uploads.values[name]
            uploads.codes[name] = code
            for memory, row in zip(updated_residuals, update - code.decoded(), strict=True):
                # Copy the row, because a view would keep the rows of all clients in memory.
                memory[name] = row.clone()


class TopK(Compression):
    """Compression that sends only the largest elements, by absolute value, of the update of each entry.

    From n elements, ``fraction * n`` are sent, rounded up. The positions of these elements are sent as 4 bytes per sent
    element, or as one bit for each of the n elements, whichever is shorter. With ``bits``, the sent elements are also
    quantized as in `Quantize`.

    Args:
        fraction: Fraction of an entry's elements that are sent, above 0 and at most 1. With ``fraction=1`` and without
            ``bits``, entries are sent uncompressed, because the encoded update would not be shorter.
        bits: Bits per element, from 2 to 16. None: elements are not quantized.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> code, update = TopK(fraction=0.5), torch.tensor([[3.0, -1.0, 0.5, -4.0]])
        >>> code.decompress(code.compress(update), update[0])
        tensor([[ 3.,  0.,  0., -4.]])
        >>> TopK(fraction=0.01).nbytes(1000, itemsize=4), TopK(fraction=0.5).nbytes(1000, itemsize=4)
        (80, 2125)
    """

    @check_arguments
    def __init__(self, fraction: float = 0.1, bits: int | None = None) -> None:
        if not 0 < fraction <= 1:
            raise InvalidValueError(
                f"Expected `fraction` to be above 0 and at most 1, but got {fraction}.",
                argument="fraction",
                value=fraction,
            )
        self.fraction = float(fraction)
        self.bits = None if bits is None else _checked(bits)

    def compress(self, updates: Tensor) -> State:
        n = updates.shape[1]
        k = self._count(n)
        positions = updates.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        values = updates.gather(1, positions)
        tensors = {"values": values} if self.bits is None else _quantize(values, self.bits)
        if k == n:
            return tensors
        if _mask_is_shorter(k, n):
            mask = torch.zeros(updates.shape, dtype=torch.bool, device=updates.device)
            return {**tensors, "mask": pack_mask(mask.scatter_(1, positions, True))}
        return {**tensors, "positions": positions.int()}

    def decompress(self, tensors: State, reference: Tensor) -> Tensor:
        n = reference.numel()
        k = self._count(n)
        values = tensors["values"] if self.bits is None else _dequantize(tensors, k, self.bits, reference.dtype)
        if k == n:
            return values
        if "mask" in tensors:
            mask = unpack_mask(tensors["mask"], n)
            if not bool((mask.sum(dim=1) == k).all()):
                raise InvalidValueError(
                    f"Expected {k} marked positions in the mask of an encoded update, but got a different number."
                )
            positions = mask.nonzero()[:, 1].view(len(values), k)
        else:
            positions = tensors["positions"].long()
            if not bool((positions.diff(dim=1) > 0).all()) or int(positions.min()) < 0 or int(positions.max()) >= n:
                raise InvalidValueError(
                    f"Expected ascending positions from 0 to {n - 1} in an encoded update, but got positions in a "
                    "different order or range."
                )
        return values.new_zeros(len(values), n).scatter_(1, positions, values)

    def scale(self, tensors: State, factors: Tensor) -> State:
        name = "values" if self.bits is None else "scale"
        return {**tensors, name: tensors[name] * factors[:, None].to(tensors[name])}

    def forms(self, reference: Tensor) -> Forms:
        n = reference.numel()
        k = self._count(n)
        forms: Forms = {"values": (reference.dtype, (k,))}
        if self.bits is not None:
            forms = _quantized_forms(k, self.bits, reference.dtype)
        if k < n:
            forms |= (
                {"mask": (torch.uint8, (-(-n // 8),))} if _mask_is_shorter(k, n) else {"positions": (torch.int32, (k,))}
            )
        return forms

    def nbytes(self, n: int, itemsize: int) -> int:
        k = self._count(n)
        positions = min(4 * k, -(-n // 8)) if k < n else 0
        return positions + (k * itemsize if self.bits is None else _quantized_nbytes(k, self.bits, itemsize))

    def _count(self, n: int) -> int:
        # Round the product before `ceil`, because 0.07 * 100 is slightly above 7 in floating point.
        return math.ceil(round(self.fraction * n, 6))


class Quantize(Compression):
    """Compression that rounds each element of an update to the nearest integer multiple of a scale.

    Each entry of each client has a separate scale: the largest absolute value divided by ``2^(bits - 1) - 1``. The
    scale is sent with the integers, in 4 bytes, or in 8 bytes if the elements have 8 bytes. Unlike in QSGD (Alistarh et
    al., 2017), rounding is not stochastic, because error feedback corrects the bias.

    Args:
        bits: Bits per element, from 2 to 16.

    Raises:
        ValueError: If ``bits`` is out of range.

    Example:
        >>> code, update = Quantize(bits=3), torch.tensor([[3.0, -1.2, 0.4, -1.6]])
        >>> code.decompress(code.compress(update), update[0])
        tensor([[ 3., -1.,  0., -2.]])
        >>> Quantize(bits=8).nbytes(1000, itemsize=4)
        1004
    """

    @check_arguments
    def __init__(self, bits: int = 8) -> None:
        self.bits = _checked(bits)

    def compress(self, updates: Tensor) -> State:
        return _quantize(updates, self.bits)

    def decompress(self, tensors: State, reference: Tensor) -> Tensor:
        return _dequantize(tensors, reference.numel(), self.bits, reference.dtype)

    def scale(self, tensors: State, factors: Tensor) -> State:
        return {**tensors, "scale": tensors["scale"] * factors[:, None].to(tensors["scale"])}

    def forms(self, reference: Tensor) -> Forms:
        return _quantized_forms(reference.numel(), self.bits, reference.dtype)

    def nbytes(self, n: int, itemsize: int) -> int:
        return _quantized_nbytes(n, self.bits, itemsize)


def _checked(bits: int) -> int:
    if type(bits) is not int or not 2 <= bits <= 16:
        raise InvalidValueError(
            f"Expected `bits` to be an integer from 2 to 16, but got {bits!r}.", argument="bits", value=bits
        )
    return bits


def _mask_is_shorter(k: int, n: int) -> bool:
    return -(-n // 8) < 4 * k


def _quantize(values: Tensor, bits: int) -> State:
    """Round the values of each client, shape (clients, n), to integer multiples of the client's scale.

    Return a dict with the tensor ``scale`` and the packed tensor ``integers``.
    """
    levels = 2 ** (bits - 1) - 1
    # Half precision is too coarse for this computation.
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    scale = wide.abs().amax(dim=1, keepdim=True) / levels
    multiples = (wide / torch.where(scale > 0, scale, 1)).round_().clamp_(-levels, levels)
    integers = multiples.nan_to_num_().int() + levels
    return {"scale": scale, "integers": pack_integers(integers, bits)}


def _dequantize(tensors: State, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    levels, scale = 2 ** (bits - 1) - 1, tensors["scale"]
    multiples: Tensor = (unpack_integers(tensors["integers"], n, bits) - levels).to(scale.dtype)
    return multiples.mul_(scale).to(dtype)


def _quantized_forms(n: int, bits: int, dtype: torch.dtype) -> Forms:
    scale = torch.promote_types(dtype, torch.float32)
    return {"scale": (scale, (1,)), "integers": (torch.uint8, (-(-n * bits // 8),))}


def _quantized_nbytes(n: int, bits: int, itemsize: int) -> int:
    return -(-n * bits // 8) + max(4, itemsize)
