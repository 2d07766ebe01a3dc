"""Check the class, argument, value and code of an error instead of its text."""

from unittest.mock import ANY

import pytest

from lightning_fcl.errors import LightningFCLError


def raises(kind: type[LightningFCLError], argument: str | None = None, *, value: object = ANY, code: str = ""):
    """Return a context manager that fails unless its block raises an error with these attributes.

    Args:
        kind: Class of the error. Subclasses are not accepted.
        argument: Name of the invalid argument, option, field or entry. None for an error without an argument, which
            requires `value` or `code`.
        value: Actual value in the error. Any value by default.
        code: Code of the error. Defaults to the code of the class.
    """
    if argument is None and value is ANY and not code:
        raise TypeError(
            "Expected an argument, a value or a code of the error, but got none. Use pytest.raises instead."
        )
    expected = (kind, argument, value, code or kind.code)

    def check(error: LightningFCLError) -> bool:
        found = (type(error), error.argument, error.value, error.code)
        if found != expected:
            raise AssertionError(f"Expected (class, argument, value, code) {expected} but got {found}.") from error
        return True

    return pytest.raises(kind, check=check)
