"""BibTeX entries of papers: a parser, and the entries in ``citations.bib``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.reading import read_text

_ENTRY = re.compile(r"@(\w+)\s*\{\s*([^\s,{}\"#%'()=~\\]+)\s*,")
_BETWEEN = re.compile(r"(?:\s+|%[^\n]*)*")
_FIELD = re.compile(r"\s*([A-Za-z][\w-]*)\s*=\s*")
_BARE_VALUE = re.compile(r"\w+")


@dataclass(frozen=True)
class BibEntry:
    """A BibTeX entry.

    Args:
        key: Key of the entry, for citations.
        kind: Type of the entry, in lower case, such as ``"article"``.
        fields: Value of each field without its delimiters, by the lower-case name of the field.
        text: The entry as text.
    """

    key: str
    kind: str
    fields: Mapping[str, str]
    text: str


def parse_bibtex(text: str) -> list[BibEntry]:
    """Return the entries of a BibTeX file.

    Args:
        text: Content of the file. Lines between the entries are empty or start with ``%``. The macros ``@string`` and
            ``@preamble`` and the operator ``#`` are not supported.

    Raises:
        InvalidValueError: If an entry is not valid, or if two entries have the same key.

    Example:
        >>> entry = parse_bibtex("@misc{key, title = {A {B}}, year = 2020}")[0]
        >>> entry.key, entry.fields
        ('key', {'title': 'A {B}', 'year': '2020'})
    """
    entries: dict[str, BibEntry] = {}
    position = 0
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]  # the pattern matches any text
        if position == len(text):
            return list(entries.values())
        start = position
        head = _ENTRY.match(text, start)
        if head is None:
            raise _error(text, start, "a type and a key, as in `@article{key, ...}`")
        fields, position = _parse_fields(text, head.end())
        entry = BibEntry(head[2], head[1].lower(), fields, text[start:position])
        if entry.key in entries:
            raise InvalidValueError(f"Expected different keys of BibTeX entries, but got {entry.key} twice.")
        entries[entry.key] = entry


def _parse_fields(text: str, position: int) -> tuple[dict[str, str], int]:
    """Return the fields from a position of an entry, and the position after the closing brace of the entry."""
    fields: dict[str, str] = {}
    while True:
        position += len(text[position:]) - len(text[position:].lstrip())
        if text[position : position + 1] == "}":
            return fields, position + 1
        name = _FIELD.match(text, position)
        if name is None:
            raise _error(text, position, "a field, as in `year = {2020}`")
        value, position = _parse_value(text, name.end())
        fields[name[1].lower()] = value
        rest = text[position:].lstrip()
        if rest[:1] not in ("}", ","):
            raise _error(text, position, "a comma or a closing brace after a field")
        position = len(text) - len(rest) + (rest[0] == ",")


def _parse_value(text: str, start: int) -> tuple[str, int]:
    """Return the value from a position, without its delimiters, and the position after the value."""
    opening = text[start : start + 1]
    if opening not in ("{", '"'):
        bare = _BARE_VALUE.match(text, start)
        if bare is None:
            raise _error(text, start, "a value in braces or quotation marks")
        return bare[0], bare.end()
    depth = 0
    for position in range(start + 1, len(text)):
        character = text[position]
        if depth == 0 and character == ("}" if opening == "{" else '"'):
            return text[start + 1 : position], position + 1
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    raise _error(text, start, "balanced braces in a value")


def _error(text: str, position: int, expected_text: str) -> InvalidValueError:
    return InvalidValueError(
        f"Expected {expected_text} in a BibTeX entry, but got {text[position : position + 60]!r}.",
        hint="Correct the BibTeX entry.",
        argument="citations",
        value=text[position : position + 60],
    )


@cache
def packaged_entries() -> Mapping[str, BibEntry]:
    """Return the entries in ``citations.bib`` of this package, by key.

    Example:
        >>> packaged_entries()["li2020fedprox"].fields["year"]
        '2020'
    """
    return {entry.key: entry for entry in parse_bibtex(read_text(Path(__file__).with_name("citations.bib")))}


def find_entries(citations: object, owner: str) -> tuple[BibEntry, ...]:
    """Return the entries that an attribute `citations` names.

    Args:
        citations: Keys of ``citations.bib``, or BibTeX entries as text.
        owner: Name of the class, for messages.

    Raises:
        InvalidValueError: If a key is unknown, or a text is not a BibTeX entry.
    """
    if not isinstance(citations, Iterable) or isinstance(citations, str | bytes):
        citations = [citations]
    entries: dict[str, BibEntry] = {}
    for citation in citations:
        text = citation.strip() if isinstance(citation, str) else ""
        if text in packaged_entries():
            entries[text] = packaged_entries()[text]
        elif text.startswith("@"):
            entries |= {entry.key: entry for entry in parse_bibtex(text)}
        else:
            raise InvalidValueError(
                f"Expected `citations` of {owner} to contain BibTeX entries, or keys of entries of lightning-fcl, but "
                f"got {citation!r}.",
                hint='Write the whole entry, as in `citations = ("@misc{key, title = {A title}}",)`.',
                argument="citations",
                value=citation,
            )
    return tuple(entries.values())
