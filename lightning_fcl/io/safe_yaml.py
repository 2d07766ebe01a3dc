"""Reading of untrusted YAML with limits. The errors of `read_yaml` name the file.

The size, the depth and the number of values are limited, so that a small file cannot expand to unlimited content.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import yaml

from lightning_fcl.errors import InvalidValueError, MissingFileError, UnknownNameError
from lightning_fcl.io.reading import read_text
from lightning_fcl.library_errors import one_line
from lightning_fcl.validation import did_you_mean, require_package

Document = TypeVar("Document")

MAX_SIZE = 1_000_000
"""Maximum number of characters of a document."""

MAX_NODES = 100_000
"""Maximum number of values of a document. A value is counted again for each alias that repeats it."""

MAX_DEPTH = 100
"""Maximum depth of nested values."""


class _LimitError(yaml.YAMLError):
    """An error for a document that exceeds a limit, with a hint on how to fix the document."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message} {hint}")
        self.message, self.hint = message, hint


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that parses 1e-3 as a number. PyYAML parses 1e-3 as a string."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file that does not exceed the limits.

    Raises:
        MissingFileError: If there is no such file.
        InvalidValueError: If the content is not YAML, or exceeds a limit.
    """
    try:
        return load_yaml(read_text(path, max_bytes=MAX_SIZE))
    except FileNotFoundError:
        raise MissingFileError(f"Expected a YAML file at {path} but there is none.", value=path) from None
    except _LimitError as error:
        raise InvalidValueError(f"In {path}: {error.message}", hint=error.hint) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"Expected {path} to be YAML but got: {one_line(error)}.", value=path) from error


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document that does not exceed the limits.

    Raises:
        yaml.YAMLError: If the document is not YAML, or exceeds a limit.
    """
    check_yaml(text)
    return yaml.load(text, _Loader)


def parse_dataclass(kind: type[Document], content: object, source: object, **prepared_fields: object) -> Document:
    """Return an instance of a dataclass, with fields that are parsed from a document.

    Args:
        kind: The dataclass.
        content: Content of the document, a mapping of field names to plain values.
        source: Name of the document for messages.
        **prepared_fields: Values of fields that are not in the document. Pass fields that can name a class here,
            because jsonargparse would import the class.

    Raises:
        InvalidValueError: If the content is not a mapping, or a value is invalid.
        UnknownNameError: If a name in the content is not the name of a field.
    """
    jsonargparse = require_package("jsonargparse", "reads documents")
    field_names = [field.name for field in fields(kind) if field.name not in prepared_fields]  # type: ignore[arg-type]
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            f"Expected {source} to contain a mapping (`name: value`), but got {str(content)[:100]!r}.", value=content
        )
    for name in content:
        if name not in field_names:
            hint = did_you_mean(name, field_names)
            raise UnknownNameError(
                f"Expected the names in {source} to be among {', '.join(field_names)}, but got {str(name)[:100]}.",
                hint=hint,
                argument=str(name),
            )
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, skip={*prepared_fields})
    try:
        values = parser.parse_object(deepcopy(dict(content)))
    except jsonargparse.ArgumentError as error:
        raise InvalidValueError(
            f"Expected {source} to have valid values but got: {one_line(error)}.", code="not-understood"
        ) from error
    try:
        return kind(**vars(values), **prepared_fields)
    except ValueError as error:
        detailed_error = InvalidValueError(
            f"In {source}: {error}", argument=getattr(error, "argument", None), value=getattr(error, "value", None)
        )
        detailed_error.hint = getattr(error, "hint", "")  # the text of the error already contains the hint
        raise detailed_error from error


def resolve_class(path: str) -> Any:
    """Return the class or function at a ``class_path``. A function must have a return annotation."""
    target = resolve_name(path)
    if not isinstance(target, type) and "return" not in getattr(target, "__annotations__", {}):
        raise InvalidValueError(
            f"Expected `class_path` to name a class, or a function with a return annotation, but got {path}.",
            argument="class_path",
            value=path,
        )
    return target


def check_yaml(text: str) -> None:
    """Raise yaml.YAMLError if a document is too large, is nested too deeply, has too many values, or repeats a key."""
    if len(text) > MAX_SIZE:
        raise _LimitError(f"Expected at most {MAX_SIZE} characters but got {len(text)}.", "Shorten the document.")
    depth = 0
    # Check the depth on the events, because `yaml.compose` is recursive and does not limit the depth.
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _LimitError(
                f"Expected at most {MAX_DEPTH} levels of nested values, but got more.", "Use fewer levels."
            )
    try:
        root = yaml.compose(text, _Loader)
        if root is not None and _size(root, {}) > MAX_NODES:
            raise _LimitError(
                f"Expected at most {MAX_NODES} values, including values that aliases repeat, but got more.",
                "Use fewer values or aliases.",
            )
    except RecursionError:
        raise _LimitError(
            "Expected no value to contain itself, but a value contains itself.",
            "Write the value out, without an alias.",
        ) from None


def _size(node: yaml.Node, size_by_id: dict[int, int]) -> int:
    """Return the number of values in a node. A value is counted again for each alias that repeats it.

    Raises:
        RecursionError: If the node contains itself.
        yaml.YAMLError: If a mapping has the same key twice.
    """
    if id(node) not in size_by_id:
        seen_keys: set[object] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            name = key.value if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen_keys and name != "<<":  # PyYAML silently keeps the last value
                line = key.start_mark.line + 1
                raise _LimitError(
                    f"Expected each key once but got `{name}` again in line {line}.", "Remove one of the two keys."
                )
            seen_keys.add(name)
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        size_by_id[id(node)] = 1 + sum(_size(part, size_by_id) for part in parts)
    return size_by_id[id(node)]
