"""The arguments of a stream by their short names, and by the names that they had once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lightning_fcl.data.scenarios import Scenario
from lightning_fcl.errors import did_you_mean

T = TypeVar("T")

# What arguments that there were once are called now.
RENAMED = {
    "clients": "partition=IID(clients=...), or an argument of the scenario",
    "experiences": "scenario=ClassIncremental(experiences=...)",
    "rounds_per_experience": "scenario=ClassIncremental(rounds_per_experience=...)",
    "samples_per_round": "scenario=ClassIncremental(samples_per_round=...)",
    "class_order": "scenario=ClassIncremental(class_order=...) or DomainIncremental(domain_order=...)",
    "order_per_client": "scenario=ClassIncremental(order_per_client=...)",
    "history": "an argument of the scenario, as in ClassIncremental(history=...)",
    "test": "split=Split(test=...)",
    "validation": "split=Split(validation=...)",
    "owners": "split=Split(train_clients=...)",
    "partition_args": "arguments of the partition, as in Dirichlet(alpha=...)",
    "scenario_args": "arguments of the scenario, as in FLwFScenario(rounds=...)",
    "data_args": "data=PublicData(name, options=...)",
    "root": "data=PublicData(name, root=...)",
}


def refuse_renamed(name: str, old: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse arguments that a class does not have, with the name that they have now.

    Args:
        name: The class.
        old: The arguments.
        known: Those that it has.

    Raises:
        TypeError: If there are any.

    Example:
        >>> refuse_renamed("FederatedStream", {"owners": ["a"]}, ["data"])
        Traceback (most recent call last):
        TypeError: Expected an argument of `FederatedStream` but got `owners`. Write split=Split(train_clients=...).
    """
    for argument in old:
        hint = f" Write {RENAMED[argument]}." if argument in RENAMED else did_you_mean(argument, known)
        raise TypeError(f"Expected an argument of `{name}` but got `{argument}`.{hint}")


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


def new_name(message: str) -> str:
    """The end of a parser's message about an argument of the data that has another name now; empty for others.

    Example:
        >>> new_name("Group 'data' does not accept option 'owners'")
        ' Instead of `data.owners` write split=Split(train_clients=...).'
    """
    found = re.search(r"(?:'data' does not accept option '|option 'data\.|--data\.)(\w+)", message)
    name = found[1] if found else ""
    return f" Instead of `data.{name}` write {RENAMED[name]}." if name in RENAMED else ""


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
