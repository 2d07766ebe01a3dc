"""The arguments of a stream by their short names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from lightning_fcl.data.scenarios import Scenario
from lightning_fcl.errors import did_you_mean

T = TypeVar("T")


def refuse_dealt(scenario: Scenario, **given: object) -> None:
    """Refuse the ``partition``, ``client`` or ``split`` that a scenario has no use for.

    Raises:
        ValueError: If there is one.
    """
    for argument, value in given.items():
        dealt, what = (scenario.own_split, "tests") if argument == "split" else (scenario.own_clients, "clients")
        if dealt and value is not None:
            raise ValueError(
                f"Expected no `{argument}` for `{scenario}`, which draws the samples of {what} itself, but got "
                f"{value}. Leave it out."
            )


def named(argument: str, given: T | str, kinds: Iterable[type[T]]) -> T:
    """A scenario or partition, or that of a class's name, as in "class-incremental" or "ClassIncremental".

    Args:
        argument: What the argument is called.
        given: An object, or the name of a class, which is made with its own defaults.
        kinds: The classes that there are.

    Raises:
        ValueError: If there is no such class.
        TypeError: If it is something else.

    Example:
        >>> from lightning_fcl.data.partition import Partition
        >>> named("partition", "iid", Partition.__subclasses__())
        IID(clients=10)
    """
    known = {kind.__name__: kind for kind in kinds}
    if not isinstance(given, str):
        if not isinstance(given, tuple(known.values())):
            raise TypeError(
                f"Expected `{argument}` to be an object of {', '.join(known)}, or one of these names, but got "
                f"{given!r}."
            )
        return given
    wanted = given.replace("-", "").lower()
    for full, kind in known.items():
        if wanted in (full.lower(), full.lower().removesuffix("scenario")):
            return kind()
    hint = did_you_mean(given, known)
    raise ValueError(f'Expected `{argument}` to be one of {", ".join(known)} but got "{given}".{hint}')
