"""Tests that `raises` fails if one attribute of an error differs."""

import pytest
from raising import raises

from lightning_fcl.errors import DamagedFileError, InvalidTypeError, InvalidValueError, UnknownNameError

LR = InvalidValueError("Expected `lr` to be above 0 but got 0.", argument="lr", value=0)
FILE = DamagedFileError("Expected a.csv to be CSV.", value="a.csv", code="no-csv")


def raise_within(context, error):
    with context as caught:
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("expected", "error"),
    [
        (raises(InvalidValueError, "lr"), LR),
        (raises(InvalidValueError, "lr", value=0), LR),
        (raises(DamagedFileError, code="no-csv"), FILE),
        (raises(DamagedFileError, value="a.csv", code="no-csv"), FILE),
    ],
)
def test_raises_equal_attributes_returns_the_error(expected, error):
    assert raise_within(expected, error) is error


@pytest.mark.parametrize(
    ("expected", "error"),
    [
        (raises(InvalidValueError, "momentum"), LR),
        (raises(InvalidValueError, value=0), LR),
        (raises(InvalidValueError, "lr", value=1), LR),
        (raises(InvalidValueError, "lr", code="too-small"), LR),
        (raises(DamagedFileError, value="a.csv"), FILE),
        (raises(InvalidValueError, value="a.csv", code="no-csv"), FILE),
        (raises(InvalidValueError, "lr"), UnknownNameError("Expected `lr`.", argument="lr")),
    ],
)
def test_raises_another_attribute_fails(expected, error):
    with pytest.raises(AssertionError, match="class, argument, value, code") as caught:
        raise_within(expected, error)
    assert caught.value.__cause__ is error


def test_raises_unrelated_error_propagates():
    error = InvalidTypeError("Expected `lr` to be a number.", argument="lr")
    with pytest.raises(InvalidTypeError) as caught:
        raise_within(raises(InvalidValueError, "lr"), error)
    assert caught.value is error


def test_raises_no_error_fails():
    with pytest.raises(pytest.fail.Exception), raises(InvalidValueError, "lr"):
        pass


def test_raises_without_attributes_is_rejected():
    with pytest.raises(TypeError):
        raises(InvalidValueError)
