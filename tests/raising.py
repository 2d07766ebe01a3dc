"""Check the class, the argument, the value and the code of an error in place of its text."""

from unittest.mock import ANY

import pytest

from lightning_fcl.errors import LightningFCLError


def raises(kind: type[LightningFCLError], argument: str | None = None, *, value: object = ANY, code: str = ""):
    """Return a context manager that fails unless its block raises an error with these attributes.

    Args:
        kind: Class of the error. An error of a subclass fails.
        argument: Name of the wrong argument, option, field or entry. Default: the error names no argument, and `value`
            or `code` is needed.
        value: What was found instead of a valid value. Default: any value.
        code: Kind of the error. Default: that of the class.
    """
    if argument is None and value is ANY and not code:
        raise TypeError("Expected an argument, a value or a code of the error. Use pytest.raises(..., match=...).")
    expected = (kind, argument, value, code or kind.code)

    def check(error: LightningFCLError) -> bool:
        found = (type(error), error.argument, error.value, error.code)
        if found != expected:
            raise AssertionError(f"Expected (class, argument, value, code) {expected} but got {found}.") from error
        return True

    return pytest.raises(kind, check=check)
