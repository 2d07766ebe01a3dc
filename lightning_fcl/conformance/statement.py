"""A statement about a method, and all that there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L

from lightning_fcl.methods.method import Method

Kind = type[Method] | type[L.LightningModule]


class NotTriedError(Exception):
    """A statement cannot be tried on a class, and why."""


@dataclass(frozen=True)
class Statement:
    """What holds of every implementation of a method.

    Args:
        claim: Whose statement it is: the method's name; "Method": of every method.
        says: The statement, a sentence.
        check: Tries it on a class.
    """

    claim: str
    says: str
    check: Callable[[Any], None]

    def __str__(self) -> str:
        return f"{self.claim}: {self.says}"


STATEMENTS: list[Statement] = []


def states(claim: str, says: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a function that tries a class a statement, of one claim."""

    def keep(check: Callable[[Any], None]) -> Callable[[Any], None]:
        STATEMENTS.append(Statement(claim, says, check))
        return check

    return keep
