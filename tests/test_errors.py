import ast
import builtins
import copy
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_fcl import errors
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.validation import (
    above,
    at_least,
    between,
    check_clients,
    did_you_mean,
    format_code_names,
    format_names,
    one_of,
    require_package,
    unit_interval,
    validate_fields,
    validated,
)


def test_require_package_missing_names_the_pip_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"^Expected `PIL`, which reads images, .*`pip install pillow`\.$"):
        require_package("PIL.Image", "reads images")


def test_require_package_missing_dependency_is_named(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import its_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ModuleNotFoundError, match=r"`its_dependency`.*pip install \"lightning-fcl\[device\]\""
    ) as raised:
        require_package("half_installed", "writes files", extra="device")
    assert raised.value.name == "its_dependency"


def test_did_you_mean_suggests_only_similar_names():
    assert did_you_mean("orll", ["orl", "lfw"]) == " Did you mean orl?"
    assert did_you_mean("mnist", ["orl", "lfw"]) == ""


def test_none_for_a_field_with_another_default_raises():
    with pytest.raises(
        TypeError,
        match=r"Expected `num_experiences` to be given but got None. Leave `num_experiences` out for the default, 5.",
    ):
        ClassIncremental(num_experiences=None)
    assert ClassIncremental(samples_per_round=None, class_order=None).num_experiences == 5


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: at_least(0, mu=-1.0), "Expected `mu` to be at least 0 but got -1.0. Use 0 or more."),
        (lambda: at_least(0, mu=float("nan")), "Expected `mu` to be at least 0 but got nan. Use 0 or more."),
        (lambda: above(0, temperature=0.0), "Expected `temperature` to be above 0 but got 0.0. Use a number above 0."),
        (lambda: between(0, 1, alpha=1.7), "Expected `alpha` to be between 0 and 1 but got 1.7. Use 1 or less."),
        (
            lambda: unit_interval(rho=0.0),
            "Expected `rho` to be above 0 and at most 1 but got 0.0. Use a number above 0.",
        ),
        (
            lambda: one_of(["round", "seen"], history="sean"),
            'Expected `history` to be "round" or "seen" but got "sean". Did you mean seen?',
        ),
        (
            lambda: check_clients("`requests`", ["seven"], ["0", "1"]),
            "Expected `requests` to match clients of the stream (0, 1), but got seven. Write client names as in the "
            'stream, for example "0".',
        ),
    ],
)
def test_check_invalid_value_raises_with_the_expected_range(check, message):
    with pytest.raises(ValueError) as raised:
        check()
    assert str(raised.value) == message


def test_check_accepts_closed_bounds():
    at_least(0, mu=0)
    between(0, 1, alpha=0, beta=1)
    unit_interval(rho=1)


def test_validate_fields_checks_the_declared_range():
    @dataclass
    class Momentum:
        mu: float = validated(0.9, between, 0, 1)
        steps: int = validated(1, at_least, 1)

    validate_fields(Momentum(mu=0.5, steps=2))
    with pytest.raises(ValueError, match=r"^Expected `mu` to be between 0 and 1 but got 1\.5\. Use 1 or less\.$"):
        validate_fields(Momentum(mu=1.5))
    with pytest.raises(TypeError, match=r"^Expected `steps` to be a whole number, but got 1\.5\. Leave it out"):
        validate_fields(Momentum(steps=1.5))
    with pytest.raises(
        TypeError,
        match=r'^Expected `mu` to be a number, but got "much"\. Leave it out \(default of the class: 0\.9\)\.$',
    ):
        validate_fields(Momentum(mu="much"))


def test_format_names_limits_the_number_of_names():
    assert format_names(range(4)) == "0, 1, 2, 3"
    assert format_names(range(1000), max_names=3) == "0, 1, 2 and 997 more"
    assert format_code_names("abcde") == "`a`, `b`, `c` and 2 more"


def classes_of_errors(kind=errors.LightningFCLError):
    for derived in kind.__subclasses__():
        if derived.__module__ == "lightning_fcl.errors":
            yield derived
        yield from classes_of_errors(derived)


CLASSES = sorted({*classes_of_errors()}, key=lambda kind: kind.__name__)


def test_error_classes_have_unique_codes_and_a_built_in_base():
    codes = [vars(kind)["code"] for kind in CLASSES]
    assert len(CLASSES) > 10 and len({*codes}) == len(codes)
    for kind in CLASSES:
        assert next(base for base in kind.__mro__ if base.__module__ == "builtins") not in (Exception, object), kind


@pytest.mark.parametrize("kind", CLASSES)
def test_error_pickled_or_copied_keeps_its_attributes(kind):
    """Errors from other processes, and errors that a DataLoader worker raises again, keep their attributes too."""
    error = kind("Expected `a` to be 1 but got 2.", hint=" Use `a=1`.", argument="a", value=2, code="a-code")
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(one) is kind and str(one) == "Expected `a` to be 1 but got 2. Use `a=1`."
        assert (one.hint, one.argument, one.value, one.code) == ("Use `a=1`.", "a", 2, "a-code")
    plain = kind("Expected `a`.")
    assert (str(plain), plain.hint, plain.argument, plain.value) == ("Expected `a`.", "", None, None)
    assert plain.code == kind.code


def raised_plainly(source):
    """Yield the lines that raise an "Expected ..." message with a built-in class."""
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
            first = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
            said = str(first.value) if isinstance(first, ast.Constant) else ""
            if said.startswith("Expected ") and hasattr(builtins, call.func.id):
                yield node.lineno


def test_expected_messages_are_raised_with_error_classes_of_the_package():
    assert [*raised_plainly("def f():\n    raise ValueError('Expected x.')")] == [2]
    assert [*raised_plainly("def f(x):\n    raise TypeError(f'Expected {x}.') from None")] == [2]
    folder = Path(errors.__file__).parent
    sources = {path.relative_to(folder): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    # These files raise `NotImplementedError` for functions that a user's subclass does not define.
    allowed = {
        Path("federation/reductions.py"),
        Path("federation/uploads.py"),
    }
    assert len(sources) > 200
    assert {path for path, source in sources.items() if [*raised_plainly(source)]} == allowed
