"""Secret values of recipes: environment variables in place of keys, tokens and passwords.

A recipe may contain ``${NAME}`` as a text argument of a class. The text is replaced by the value of the environment
variable when the object is created. Files and messages contain the name of a variable in place of a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from lightning_fcl.errors import MissingValueError
from lightning_fcl.library_errors import replace_in_text

_SECRET = re.compile(
    r"(.*[_-])?(api_?-?key|token|access_?-?key|secret(_?-?key)?|passw(or)?d|passphrase|credentials?)", re.IGNORECASE
)
# Arguments of tokenizers, which are not secrets.
_TEXT = re.compile(r"(.*_)?(bos|class|cls|eos|mask|pad|sep|unk)_token", re.IGNORECASE)
_URL = re.compile(r"[\w.+-]+://[^/\s@]+@", re.IGNORECASE)  # URLs with user:password@host
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_LEFT_OUT = ("init_args", "dict_kwargs")
_SHORTEST = 4
"""Minimum length, in characters, of a secret that is replaced in messages."""

Path = tuple[str, ...]


def without_secrets(content: Any, path: Path = ()) -> Any:
    """Return a recipe, or a part of a recipe, with names of environment variables in place of its secrets.

    Args:
        content: Mappings, lists and plain values.
        path: Names of the keys that lead to the content.

    Example:
        >>> without_secrets({"logger": {"init_args": {"api_key": "abc", "project": "mine"}}})
        {'logger': {'init_args': {'api_key': '${LIGHTNING_FCL_LOGGER_API_KEY}', 'project': 'mine'}}}
    """
    if isinstance(content, Mapping):
        return {name: without_secrets(value, (*path, str(name))) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_secrets(value, (*path, str(number))) for number, value in enumerate(content)]
    return f"${{{variable_of(path)}}}" if _is_secret(content, path) else content


def secrets_of(content: Any, path: Path = ()) -> Iterator[tuple[str, str]]:
    """Yield each secret of a recipe with the text that `without_secrets` writes in its place."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(content, Mapping):
        items = iter(content.items())
    elif isinstance(content, list | tuple):
        items = iter(enumerate(content))
    elif _is_secret(content, path):
        yield str(content), f"${{{variable_of(path)}}}"
    for name, value in items:
        yield from secrets_of(value, (*path, str(name)))


def variable_of(path: Path) -> str:
    """Return the name of the environment variable for a value of a recipe.

    Example:
        >>> variable_of(("trainer", "logger", "init_args", "api_key"))
        'LIGHTNING_FCL_TRAINER_LOGGER_API_KEY'
    """
    parts = [part for name in path for part in name.split(".") if part not in _LEFT_OUT]
    return re.sub(r"\W", "_", "_".join(["LIGHTNING_FCL", *parts]).rstrip("+")).upper()


def with_variables(content: Any, path: Path = ()) -> Any:
    """Return the arguments of a class. Each text ``${NAME}`` is replaced by the value of the environment variable.

    Raises:
        MissingValueError: If an environment variable is not set.
    """
    if type(content) is dict:
        return {name: with_variables(value, (*path, str(name))) for name, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(with_variables(value, (*path, str(n))) for n, value in enumerate(content))
    variable_match = _VARIABLE.fullmatch(content) if isinstance(content, str) else None
    if variable_match is None:
        return content
    if (value := os.environ.get(variable_match[1])) is None:
        raise MissingValueError(
            f"Expected the environment variable {variable_match[1]} to contain the value of `{'.'.join(path)}`, but it "
            "is not set.",
            hint=f"Set the variable: export {variable_match[1]}=...",
            argument=".".join(path),
        )
    return value


def words_without_secrets(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the words of a command line without secrets, and pairs of a secret and its replacement."""
    safe, replacements, option = list[str](), list[tuple[str, str]](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            name, equals, value = option, "", word
        content = _parsed(value)
        path = tuple(name.lstrip("-").split("."))
        secrets = list(secrets_of(content, path))
        if not name and not secrets:
            secrets = list(secrets_of(value, ("ARGUMENT",)))
        for secret, variable in secrets:
            value = value.replace(secret, variable)
        replacements += secrets
        safe.append(f"{name}{equals}{value}" if word.startswith("-") else value)
        option = name if word.startswith("-") and not equals else ""
    return safe, replacements


def text_without_secrets(text: str, secrets: Sequence[tuple[str, str]]) -> str:
    """Return the text of a message with each secret of at least four characters replaced by its variable."""
    return replace_in_text(text, [pair for pair in secrets if len(pair[0]) >= _SHORTEST])


def _is_secret(value: object, path: Path) -> bool:
    """Return whether a value is a key, a token, a password, or a URL with a user name or a password."""
    if not isinstance(value, str) or not value or _VARIABLE.fullmatch(value):
        return False
    names = [part for part in path if part not in _LEFT_OUT and not part.isdigit()]
    return bool(_URL.match(value)) or any(_SECRET.fullmatch(name) and not _TEXT.fullmatch(name) for name in names)


def _parsed(value: str) -> Any:
    try:
        return yaml.safe_load(value) if value[:1] in ("{", "[") else value
    except yaml.YAMLError:
        return value
