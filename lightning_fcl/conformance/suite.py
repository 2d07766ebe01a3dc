"""Functions that select the statements about a class, and check them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import lightning.pytorch as L

import lightning_fcl
from lightning_fcl import methods
from lightning_fcl.conformance import averaging, forgetting, formulas, identities  # noqa: F401  registers the statements
from lightning_fcl.conformance.fixtures import STATEMENTS, Implementation, NotApplicableError, Statement
from lightning_fcl.errors import MissingValueError, UnknownNameError
from lightning_fcl.methods.method import Method
from lightning_fcl.validation import did_you_mean


def implemented_targets(kind: Implementation) -> tuple[str, ...]:
    """Return the names of the methods that a class implements: ``kind.implements``, otherwise the class name."""
    implements: object = getattr(kind, "implements", kind.__name__)
    if isinstance(implements, str):
        return (implements,)
    return tuple(implements) if isinstance(implements, list | tuple) else ()


def get_statements(kind: Implementation) -> list[Statement]:
    """Return the statements that a class must fulfill.

    Args:
        kind: A `Method`, or a LightningModule that is created as ``kind(model, num_classes)``. The class
            attribute ``implements`` names the implemented method, as in ``implements = "FedProx"``. The default is the
            name of the class. The class must use the argument names of this library. A `Method` must also fulfill the
            statements about every method.

    Raises:
        ValueError: If there are no statements about a method in ``implements``.

    Example:
        >>> from lightning_fcl.methods import FedProx
        >>> [str(one) for one in get_statements(FedProx) if one.target == "FedProx"][0]
        'FedProx: with mu = 0.0 the result equals FedAvg'
    """
    implements, targets = implemented_targets(kind), sorted({one.target for one in STATEMENTS})
    for name in implements if "implements" in vars(kind) else ():
        if name not in targets:
            raise UnknownNameError(
                f"Expected `{kind.__name__}.implements` to be one of {', '.join(targets)}, but got {name!r}.",
                hint=did_you_mean(name, targets),
            )
    general = ("Method",) if issubclass(kind, Method) else ()
    return [one for one in STATEMENTS if one.target in (*general, *implements)]


@dataclass(frozen=True)
class Outcome:
    """Result of the check of a statement.

    Args:
        result: ``"holds"``, ``"fails"``, or ``"not tried"`` if the statement cannot be checked on the class.
        why: Reason why the statement fails, or could not be checked.
    """

    result: Literal["holds", "fails", "not tried"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.result}: {self.why}" if self.why else self.result


def run_statements(kind: Implementation) -> Iterator[tuple[Statement, Outcome]]:
    """Check each statement that a class must fulfill, and yield the statement with its outcome."""
    for statement in get_statements(kind):
        try:
            statement.check(kind)
        except NotApplicableError as reason:
            yield statement, Outcome("not tried", str(reason))
        except AssertionError as reason:
            yield statement, Outcome("fails", str(reason))
        except Exception as error:
            yield statement, Outcome("fails", f"the check raised {type(error).__name__}: {error}")
        else:
            yield statement, Outcome("holds")


def get_classes(target: str, implements: str | None = None) -> list[Implementation]:
    """Return the classes that a target names. A target is a name in this library, a Python file, or an import path.

    Args:
        target: The target. For a file, all methods and all classes with ``implements`` are returned.
        implements: Name of the method that the classes implement. By default, the attribute ``implements`` of each
            class, or the name of the class.

    Raises:
        ValueError: If there is no such class.
    """
    if target.endswith(".py"):
        path = Path(target)
        if not path.is_file():
            raise MissingValueError(f"Expected a Python file at {target}, but the file does not exist.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        # Python has a loader for every file name that ends in .py.
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        objects = [one for one in vars(module).values() if getattr(one, "__module__", "") == path.stem]
        objects = [
            one for one in objects if isinstance(one, type) and (issubclass(one, Method) or "implements" in vars(one))
        ]
    elif "." in target:
        home, _, name = target.rpartition(".")
        objects = [getattr(import_module(home), name, None)]
    else:
        objects = [getattr(methods, target, None) or getattr(lightning_fcl, target, None)]
    kinds = [one for one in objects if isinstance(one, type) and issubclass(one, Method | L.LightningModule)]
    if not kinds:
        public = {name: getattr(methods, name) for name in dir(methods)}
        method_names = [name for name, one in public.items() if isinstance(one, type) and issubclass(one, Method)]
        raise UnknownNameError(
            f"Expected a method, or a file with a method, but got {target}.", hint=did_you_mean(target, method_names)
        )
    if implements is not None:
        kinds = [type(one.__name__, (one,), {"implements": implements}) for one in kinds]
    return kinds
