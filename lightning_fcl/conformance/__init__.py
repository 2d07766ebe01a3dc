"""Statements that a method's paper makes, tried on anybody's implementation of it.

What never belongs here: methods, and accuracies; a statement is an identity, or holds on several seeds with a margin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fcl.door import lazy_names

if TYPE_CHECKING:
    from lightning_fcl.conformance.suite import classes_of as classes_of
    from lightning_fcl.conformance.suite import statements_of as statements_of
    from lightning_fcl.conformance.suite import try_statements as try_statements
    from lightning_fcl.conformance.trial import NotTriedError as NotTriedError
    from lightning_fcl.conformance.trial import Statement as Statement
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
