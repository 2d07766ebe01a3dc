"""Messages that say what was expected and how to mend it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType

__all__ = ["did_you_mean", "require"]

# What pip calls the packages that are imported by another name.
_DISTRIBUTIONS = {"PIL": "pillow", "avalanche": "avalanche-lib", "sklearn": "scikit-learn"}


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about a name that is not known: the nearest that is, if one is near.

    Args:
        name: What was asked for.
        known: The names that exist.
        cutoff: How alike the two must be, from 0 (anything) to 1 (the same).

    Returns:
        A sentence with a space before it, or nothing.

    Example:
        >>> did_you_mean("FedIPP", ["FedRR", "FedIP"])
        ' Did you mean FedIP?'
    """
    near = get_close_matches(str(name), list(known), 1, cutoff)
    return f" Did you mean {near[0]}?" if near else ""


def require(module: str, for_what: str, extra: str | None = None) -> ModuleType:
    """Import a package that not everybody has, or say what it is needed for and how to install it.

    Args:
        module: Name of the module, such as ``"PIL.Image"``.
        for_what: What the package does here, after "which".
        extra: The extra of lightning-fcl that brings it; None: pip installs the package itself.

    Returns:
        The imported module.

    Raises:
        ModuleNotFoundError: If it, or a package that it needs, is not installed.

    Example:
        >>> require("math", "adds numbers").prod([2, 3])
        6
        >>> require("no_such_package", "reads images", extra="device")
        Traceback (most recent call last):
        ModuleNotFoundError: Expected `no_such_package`, which reads images, but it is not installed. Run `pip install \
"lightning-fcl[device]"`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        wanted = f'"lightning-fcl[{extra}]"' if extra else _DISTRIBUTIONS.get(missing, missing)
        raise ModuleNotFoundError(
            f"Expected `{missing}`, which {for_what}, but it is not installed. Run `pip install {wanted}`.",
            name=error.name,
        ) from error
