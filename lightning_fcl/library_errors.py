"""Errors of other libraries, recognized by their text. Only this module recognizes errors by their text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum


class LibraryError(Enum):
    """A kind of error of another library. The value is a regular expression for the text of the error."""

    # torch
    WORKER_ENDED = r"DataLoader worker \(pid.*\) exited unexpectedly"
    ONE_SAMPLE = "Expected more than 1 value per channel when training"
    VMAP_RANDOM = "vmap: .*randomness"
    VMAP_ITEM = r"vmap: .*\.item\(\)"
    VMAP_BRANCH = "data-dependent control flow"
    NO_TORCH_DEVICE = r"(?s)^(.*(?:backend found|torch_xla|can not run on your system).*)$"
    # torch, NumPy and the loader of shared libraries
    NO_MEMORY = r"failed to map segment|[Cc]annot allocate|can't allocate memory|[Uu]nable to allocate|bad_alloc"
    # Lightning
    UNKNOWN_PLUGIN = r"^(You selected an invalid (\w+) name: `\w+='(\w+)'`\.)"
    UNKNOWN_METRIC = (
        r"(?s)(?:conditioned on metric `|monitor=')(?P<name>.*?)['`]\)?`? (?:which is not|could not find)(?P<known>.*)"
    )
    SEED_BOUNDS = r"(-?\d+) is not in bounds, numpy accepts from 0 to (\d+)"
    SAME_CALLBACKS = r"more than one stateful callback of type `(\w+)`"
    DEVICES = r"`devices` selected with|`Trainer\(devices=.*\)` value is not a valid input"


def match_error(error: BaseException, kind: LibraryError) -> re.Match[str] | None:
    """Return the match of an error's text with the pattern of a kind, or None if the text does not match."""
    return re.search(kind.value, str(error))


def first_line(error: BaseException, length: int = 200) -> str:
    r"""Return the first line of an error's text for a message, cut off after ``length`` characters.

    Example:
        >>> first_line(ValueError("the first line\nthe second line")), first_line(KeyError())
        ('the first line', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0][:length] if lines else type(error).__name__


def one_line(error: BaseException, length: int = 500) -> str:
    """Return an error's text in one line of at most ``length`` characters, without a final period."""
    return (" ".join(str(error).split()) or type(error).__name__)[:length].rstrip(".")


def replace_in_text(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    """Return a text with words replaced. The longest words are replaced first.

    Args:
        text: Text of a message.
        replacements: Pairs of a word and its replacement.
    """
    for word, other in sorted(replacements, key=lambda pair: -len(pair[0])):
        text = text.replace(word, other)
    return text
