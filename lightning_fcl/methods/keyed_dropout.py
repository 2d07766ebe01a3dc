"""Random layers that draw numbers from a client's key. Vectorized and sequential training then use the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def uniform(key: Tensor, stream: int, shape: Sequence[int]) -> Tensor:
    """Return random numbers in [0, 1). A number depends only on the key, the stream and the number's position.

    Therefore, padding samples at the end of a batch do not change the numbers of other samples.

    Args:
        key: Key of the client and step, an integer tensor.
        stream: Number of the draw, from 1.
        shape: Shape of the result.
    """
    counter = torch.arange(1, math.prod(shape) + 1, device=key.device) * _STEP
    value = _mixed(_mixed(key + stream) + counter)
    # A float32 has a mantissa of 24 bits.
    numbers: Tensor = _shifted(value, 40).to(torch.float32) * 2.0**-24
    return numbers.view(tuple(shape))


def _mixed(value: Tensor) -> Tensor:
    """Return the results of the finalizer of SplitMix64 for signed integers, as in `lightning_fcl.rng`."""
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    result: Tensor = value ^ _shifted(value, 31)
    return result


def _shifted(value: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (value >> bits) & (2 ** (64 - bits) - 1)
    return shifted


class KeyedRandomness(TorchFunctionMode):
    """A context manager in which random layers draw numbers from a key instead of torch's global generator.

    The context covers these functions of `torch.nn.functional`: ``dropout``, ``dropout1d`` to ``dropout3d``,
    ``alpha_dropout``, ``feature_alpha_dropout``, and the dropout of ``scaled_dot_product_attention``. It also covers
    ``bernoulli``, ``rand_like`` and ``Tensor.bernoulli_``, which third-party layers use (such as timm's ``DropPath``).

    Args:
        key: The key, or a function that returns the key. The function is called once, at the first draw.
    """

    def __init__(self, key: Tensor | Callable[[], Tensor]) -> None:
        super().__init__()
        self._key = key
        self._stream = 0
        # Whether a function was called that may draw from the key, or that reads the state of torch's generator.
        self.has_read_rng_state = False
        # For each saved state of torch's generator: the value of `_stream`, and whether this context was active.
        self._noted: WeakIdKeyDictionary | None = None

    def __enter__(self) -> KeyedRandomness:
        _ENTERED.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _ENTERED.pop()

    @contextmanager
    def recomputable(self) -> Iterator[None]:
        """Temporarily draw from the key so that recomputation, as in `torch.utils.checkpoint`, draws the same numbers.

        Saving and restoring the state of torch's generator also saves and restores the position in the draws from the
        key. In ``loss.backward()``, torch does not apply this context. The context is therefore activated again when a
        saved state is restored in ``loss.backward()``.
        """
        get_state, restore_state = torch.get_rng_state, torch.set_rng_state

        def get_rng_state() -> Tensor:
            state = get_state()
            self.has_read_rng_state = True
            if self._noted is None:
                self._noted = WeakIdKeyDictionary()
            self._noted[state] = self._stream, _is_entered(state)
            return state

        def set_rng_state(new_state: Tensor) -> None:
            restore_state(new_state)
            noted = {} if self._noted is None else self._noted
            self._stream, was_entered = noted.get(new_state, (self._stream, None))
            is_entered = _is_entered(new_state)
            if was_entered is True and not is_entered:
                super(KeyedRandomness, self).__enter__()  # type: ignore[no-untyped-call]
            elif was_entered is False and is_entered:
                super(KeyedRandomness, self).__exit__(None, None, None)  # type: ignore[no-untyped-call]

        torch.get_rng_state, torch.set_rng_state = get_rng_state, set_rng_state
        try:
            with self:
                yield
        finally:
            torch.get_rng_state, torch.set_rng_state = get_state, restore_state

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keyed_function = _KEYED.get(function)
        if keyed_function is None:
            return function(*args, **kwargs) if kwargs else function(*args)
        self.has_read_rng_state = True
        return keyed_function(self, *args, **(kwargs or {}))

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return random numbers in [0, 1) of the given shape, for the next call of a random layer."""
        self._stream += 1
        if not isinstance(self._key, Tensor):
            self._key = self._key()
        return uniform(self._key, self._stream, shape)

    def _keep_mask(self, x: Tensor, p: float, channels: bool) -> Tensor:
        """Return a mask with 1 for kept elements and 0 for others. With ``channels``, mask whole channels."""
        shape = x.shape[:2] if channels else x.shape
        return (self.uniform(shape) >= p).to(x.dtype).view(*shape, *[1] * (x.dim() - len(shape)))

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, channels: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        return _given(input, input * (self._keep_mask(input, p, channels) / (1 - p) if p < 1 else 0.0), inplace)

    def alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, channels: bool = False
    ) -> Tensor:
        """Return the input after alpha dropout, which sets dropped elements to SELU's negative saturation value."""
        if not training or p == 0:
            return input
        alpha = 1.7580993408473766
        scale = ((alpha * alpha * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
        mask = self._keep_mask(input, p, channels)
        return _given(input, (input * mask - alpha * (1 - mask)) * scale + alpha * p * scale, inplace)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the output of attention, as `torch.nn.functional.scaled_dot_product_attention` does.

        With dropout, the attention weights are computed explicitly.
        """
        if not dropout_p:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(
                scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -torch.inf
            )
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self.dropout(scores.softmax(dim=-1), dropout_p) @ value

    def rand_like(self, input: Tensor, **kwargs: Any) -> Tensor:
        return self.uniform(input.shape).to(kwargs.get("dtype") or input.dtype)

    def bernoulli(self, input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
        return (self.uniform(input.shape) < (input if p is None else p)).to(input.dtype)

    def bernoulli_(self, input: Tensor, p: float = 0.5, **kwargs: Any) -> Tensor:
        return input.copy_(self.bernoulli(input, p))


def _is_entered(x: Tensor) -> bool:
    """Return whether a random function that is called at this point draws from a key."""
    return bool(handle_torch_function(_is_entered, (x,), x)) if has_torch_function_unary(x) else False


def _given(input: Tensor, output: Tensor, inplace: bool) -> Tensor:
    return input.copy_(output) if inplace else output


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the position in the draws from a key after the context, as if nothing had been drawn in the context."""
    entered = _ENTERED[-1:]
    streams = [mode._stream for mode in entered]
    try:
        yield
    finally:
        for mode, stream in zip(entered, streams, strict=True):
            mode._stream = stream


_ENTERED: list[KeyedRandomness] = []

_KEYED: dict[Callable[..., Any], Callable[..., Any]] = {
    _is_entered: lambda mode, x: True,
    F.dropout: KeyedRandomness.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), partial(KeyedRandomness.dropout, channels=True)),
    F.alpha_dropout: KeyedRandomness.alpha_dropout,
    F.feature_alpha_dropout: partial(KeyedRandomness.alpha_dropout, channels=True),
    F.scaled_dot_product_attention: KeyedRandomness.attention,
    torch.rand_like: KeyedRandomness.rand_like,
    torch.bernoulli: KeyedRandomness.bernoulli,
    Tensor.bernoulli_: KeyedRandomness.bernoulli_,
}
