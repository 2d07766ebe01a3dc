"""Comparisons of two methods that are fixed before the runs: ``comparisons`` in ``rows.yaml``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.validation import did_you_mean

MAX_COMPARISONS = 10
"""Maximum number of planned comparisons. The correction for several tests makes each test weaker."""


@dataclass(frozen=True)
class PlannedComparison:
    """A comparison of the last accuracy of two methods under one protocol.

    Args:
        protocol: Name of the protocol.
        first: Name of the first method. A positive difference means that this method is more accurate.
        second: Name of the second method.
        question: Question that the comparison answers.
    """

    protocol: str
    first: str
    second: str
    question: str

    @property
    def rows(self) -> tuple[str, str]:
        """Rows of both methods in the table."""
        return f"{self.protocol} {self.first}", f"{self.protocol} {self.second}"

    @property
    def name(self) -> str:
        """Name of the comparison, such as "P4: AFL - Fed3R"."""
        return f"{self.protocol}: {self.first} - {self.second}"


def read_comparisons(
    content: Mapping[str, Any], protocols: Mapping[str, Collection[str]]
) -> tuple[PlannedComparison, ...]:
    """Return the entries of ``comparisons`` in ``rows.yaml``. The result is empty if there is no such key.

    Args:
        content: Content of ``rows.yaml``.
        protocols: Methods of each protocol.

    Raises:
        InvalidValueError: If there are more than ten comparisons, or if an entry has other keys, equal methods, or the
            methods of an earlier entry.
        UnknownNameError: If a protocol or a method is unknown.

    Example:
        >>> entry = {"protocol": "P4", "first": "AFL", "second": "Fed3R", "question": "Is AFL better?"}
        >>> [planned.rows for planned in read_comparisons({"comparisons": [entry]}, {"P4": ["AFL", "Fed3R"]})]
        [('P4 AFL', 'P4 Fed3R')]
    """
    entries = content.get("comparisons") or []
    names = [field.name for field in fields(PlannedComparison)]
    if not isinstance(entries, list) or len(entries) > MAX_COMPARISONS:
        raise InvalidValueError(
            f"Expected `comparisons` to be a list of at most {MAX_COMPARISONS} entries, but got "
            f"{len(entries) if isinstance(entries, list) else repr(entries)}.",
            argument="comparisons",
            value=entries,
        )
    planned: list[PlannedComparison] = []
    for entry in entries:
        if (
            not isinstance(entry, Mapping)
            or {*entry} != {*names}
            or not all(isinstance(v, str) for v in entry.values())
        ):
            raise InvalidValueError(
                f"Expected each entry of `comparisons` to have the texts {', '.join(names)}, but got {entry}.",
                argument="comparisons",
                value=entry,
            )
        comparison = PlannedComparison(**entry)
        check_known(comparison.protocol, protocols, "the protocol of a comparison", "comparisons")
        for method in (comparison.first, comparison.second):
            check_known(method, protocols[comparison.protocol], f"the methods of {comparison.name}", "comparisons")
        if comparison.first == comparison.second or {*comparison.rows} in [{*other.rows} for other in planned]:
            raise InvalidValueError(
                f"Expected each entry of `comparisons` to have two other methods, but got {comparison.name}"
                f"{' twice' if comparison.first != comparison.second else ''}.",
                argument="comparisons",
                value=asdict(comparison),
            )
        planned.append(comparison)
    return tuple(planned)


def check_known(name: str, known_names: Collection[str], subject: str, argument: str) -> None:
    """Raise UnknownNameError if a name is not a known name."""
    if name not in known_names:
        raise UnknownNameError(
            f"Expected {subject} to be among {', '.join(known_names)}, but got {name}.",
            hint=did_you_mean(name, known_names),
            argument=argument,
            value=name,
        )
