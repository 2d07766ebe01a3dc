"""The content of checkpoints: tensors and plain values, so that a checkpoint can be read without running code."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from torch import Tensor

from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.checkpoint import read_checkpoint
from lightning_fcl.io.reading import LimitSettingError

_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple)
_TENSORS = (Tensor, torch.nn.Parameter)
_OWNERS = {
    "callbacks": "`state_dict` of the callback `{}`",
    "optimizer_states": "`state_dict` of the optimizer",
    "lr_schedulers": "`state_dict` of the scheduler",
    "state_dict": "`state_dict` of the module",
}


def readable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with plain tensors in place of subclasses of `torch.Tensor`.

    Raises:
        ValueError: If `torch.load` with ``weights_only=True`` cannot read a value of the checkpoint.
    """
    plain_checkpoint: dict[str, Any] = _Content().plain(checkpoint, ())
    return plain_checkpoint


def check_states(callbacks: Iterable[Callback]) -> None:
    """Raise ValueError if the current state of a callback would make a checkpoint unreadable."""
    for callback in callbacks:
        try:
            state = callback.state_dict()
        except Exception:  # Some callbacks cannot return a state before training.
            continue
        _Content().plain(state, ("callbacks", callback.state_key))


class _Content:
    """Converts the values of a checkpoint, recursively."""

    def __init__(self) -> None:
        # Maps the id of a container to the container itself, or to its plain copy.
        self._found: dict[int, Any] = {}

    def plain(self, value: Any, path: tuple[object, ...]) -> Any:
        """Return a value in which plain tensors replace subclasses of `torch.Tensor`.

        If there is nothing to replace, return the value itself, not a copy.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            if kind in _TENSORS and (not vars(value) or is_data(vars(value))):
                return value
            plain_value = plain_tensor(value)
            return plain_value if type(plain_value) is Tensor else _checked(value, path)
        if kind not in _MAPPINGS + _SEQUENCES:
            return _checked(value, path)
        if id(value) not in self._found:
            self._found[id(value)] = value  # Avoids an endless loop: a container may contain itself.
            self._found[id(value)] = self._inner(value, path)
        return self._found[id(value)]

    def _inner(self, value: Any, path: tuple[object, ...]) -> Any:
        if isinstance(value, _SEQUENCES):
            kinds = {*map(type, value)}
            # The record of a run contains many lists of numbers, which this check reads without a call for each list.
            if kinds <= _PLAIN or (kinds == {list} and _PLAIN.issuperset(map(type, chain.from_iterable(value)))):
                return value
            items = [self.plain(item, (*path, number)) for number, item in enumerate(value)]
            return value if all(map(_is, items, value)) else type(value)(items)
        for key in value if not _PLAIN.issuperset(map(type, value)) else ():
            self.plain(key, (*path, key))
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        plain_items = {key: self.plain(item, (*path, key)) for key, item in value.items()}
        return value if all(map(_is, plain_items.values(), value.values())) else type(value)(plain_items)


def _is(first_value: object, second_value: object) -> bool:
    return first_value is second_value


def _checked(value: Any, path: tuple[object, ...]) -> Any:
    if is_data(value):
        return value
    first, second, *_ = (*path, "", "")
    owner = _OWNERS.get(str(first), "`on_save_checkpoint`").format(second)
    raise InvalidValueError(
        f"Expected checkpoints to contain only tensors and plain values, but `{_name_of(path)}` is a "
        f"`{type(value).__name__}`. A checkpoint with this value could not be read.",
        hint=f"In {owner}, convert the value to numbers, text, tensors, or lists and dicts of such values.",
        argument=_name_of(path),
        value=value,
    )


def _name_of(path: Sequence[object]) -> str:
    """Return a path in a checkpoint as a Python expression.

    Example:
        >>> _name_of(("callbacks", "Mine", 0))
        "checkpoint['callbacks']['Mine'][0]"
    """
    return "checkpoint" + "".join(f"[{part!r:.60}]" for part in path)


def is_data(value: object) -> bool:
    """Return whether a checkpoint that contains a value can be read without running code."""
    if type(value) in _PLAIN:
        return True
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # Pickling runs code of the value, which may raise any error.
        return False
    return True


def drop_objects(checkpoint: dict[str, Any]) -> list[str]:
    """Remove hyperparameters that cannot be read without running code, and return their names.

    With these hyperparameters, `torch.load` with ``weights_only=True`` could not read the checkpoint.
    """
    dropped_names: list[str] = []
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        objects = [name for name, value in checkpoint.get(key, {}).items() if not is_data(value)]
        if objects:
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if name not in objects}
        dropped_names += objects
    return dropped_names


def read_back(checkpoint_io: CheckpointIO, path: str | Path) -> None:
    """Raise ValueError if a checkpoint that was just written cannot be read. Remote files are not checked.

    Args:
        checkpoint_io: The plugin that wrote the checkpoint. Files of an `AsyncCheckpointIO` are not checked, because
            the plugin may not have written them yet.
        path: The path of the checkpoint.
    """
    remote = len(urlparse(str(path)).scheme) > 1
    if remote or isinstance(checkpoint_io, AsyncCheckpointIO) or not Path(path).is_file():
        return
    try:
        read_checkpoint(lambda file: checkpoint_io.load_checkpoint(file.name, weights_only=True), path)
    except LimitSettingError:
        raise
    except ValueError as error:
        raise InvalidValueError(
            f"Expected the first checkpoint of the fit to be readable, but reading {path} failed: "
            f"{error.__cause__ or error}. The file was written by `{type(checkpoint_io).__name__}`.",
            hint="Use another `checkpoint_io`, or set `enable_checkpointing=False` of the Trainer.",
            argument="checkpoint_io",
            value=type(checkpoint_io).__name__,
        ) from error
