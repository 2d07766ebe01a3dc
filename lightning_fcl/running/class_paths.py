"""What a recipe may name to be called: classes, and functions that say what they make."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from jsonargparse import Namespace


def check_class_paths(content: object) -> None:
    """Refuse a ``class_path`` that is neither a class nor a function which says what it makes."""
    content = vars(content) if isinstance(content, Namespace) else content
    if isinstance(content, Mapping):
        path = content.get("class_path")
        made = resolve_name(path) if isinstance(path, str) else type
        if not isinstance(made, type) and "return" not in getattr(made, "__annotations__", {}):
            raise ValueError(
                f"Expected `class_path` to name a class, or a function that says what it makes, but got {path}."
            )
    for part in content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else []:
        check_class_paths(part)
