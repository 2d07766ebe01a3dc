"""Conversion of Lightning's errors about a recipe into errors of this library."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fcl.errors import InvalidValueError, LightningFCLError, UnknownNameError
from lightning_fcl.library_errors import LibraryError, match_error
from lightning_fcl.simulation.hooks import RestoredNote
from lightning_fcl.validation import did_you_mean

_BY_LIGHTNING = "Expected a recipe that Lightning accepts, but got:"


@contextlib.contextmanager
def convert_errors() -> Iterator[None]:
    """Convert errors of Lightning in this block into errors of this library.

    Errors that are raised while a checkpoint is restored are also converted, except ImportError and ValueError.
    """
    try:
        yield
    except LightningFCLError:
        raise
    except Exception as error:
        if converted_error := convert_lightning_error(error):
            raise converted_error from error
        if isinstance(error, MisconfigurationException):
            raise InvalidValueError(f"{_BY_LIGHTNING} {error}", code="rejected-by-lightning") from error
        restored = [note for note in getattr(error, "__notes__", []) if isinstance(note, RestoredNote)]
        if not restored or isinstance(error, ImportError | ValueError):
            raise
        raise InvalidValueError(
            f"Expected a checkpoint of this recipe, but got {type(error).__name__} while {restored[0]}: {error}.",
            hint="Use another checkpoint, or remove `ckpt_path`.",
            argument="ckpt_path",
        ) from error


def convert_lightning_error(error: Exception) -> InvalidValueError | None:
    """Return this library's error for an error that Lightning or torch raises for a wrong argument, otherwise None."""
    if error_match := match_error(error, LibraryError.UNKNOWN_PLUGIN):
        hint = did_you_mean(error_match[3], ["federated", "auto", "cpu", "gpu", "cuda"])
        return UnknownNameError(error_match[1], hint=hint, argument=f"trainer.{error_match[2]}", value=error_match[3])
    if error_match := match_error(error, LibraryError.UNKNOWN_METRIC):
        metric_names = re.findall(r"[`']([^`',]+/[^`',]+)[`']", error_match["known"])
        return UnknownNameError(
            f"Expected `monitor` to be a logged metric, but got {error_match['name']}.",
            hint=did_you_mean(error_match["name"], metric_names)
            or (f"Use one of {', '.join(metric_names)}." if metric_names else ""),
            argument="monitor",
            value=error_match["name"],
        )
    if error_match := match_error(error, LibraryError.SEED_BOUNDS):
        return InvalidValueError(
            f"Expected `seed_everything` to be between 0 and {error_match[2]}, but got {error_match[1]}.",
            argument="seed_everything",
            value=int(error_match[1]),
        )
    if error_match := match_error(error, LibraryError.SAME_CALLBACKS):
        return InvalidValueError(
            f"Expected one `{error_match[1]}` among the callbacks, but got several.",
            hint="Remove all but one.",
            argument="trainer.callbacks",
        )
    if match_error(error, LibraryError.DEVICES):
        return InvalidValueError(
            "Expected `trainer.devices` to be a positive number of devices, but got another value.",
            hint="Set `trainer.devices` to 1, or remove it.",
            argument="trainer.devices",
        )
    if error_match := match_error(error, LibraryError.NO_TORCH_DEVICE):
        return InvalidValueError(
            f"Expected an accelerator that is available on this machine, but got: {error_match[1]}",
            hint="Use `--trainer.accelerator cpu`.",
            argument="trainer.accelerator",
        )
    return None
