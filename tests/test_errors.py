import sys

import pytest

from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import did_you_mean, require


def test_a_missing_package_is_named_as_pip_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"^Expected `PIL`, which reads images, .*`pip install pillow`\.$"):
        require("PIL.Image", "reads images")


def test_what_a_package_lacks_itself_is_named(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import its_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ModuleNotFoundError, match=r"`its_dependency`.*pip install \"lightning-fcl\[device\]\""
    ) as raised:
        require("half_installed", "writes files", extra="device")
    assert raised.value.name == "its_dependency"


def test_only_a_near_name_is_proposed():
    assert did_you_mean("orll", ["orl", "lfw"]) == " Did you mean orl?"
    assert did_you_mean("mnist", ["orl", "lfw"]) == ""


def test_none_is_refused_where_something_stands_by_default():
    with pytest.raises(TypeError, match=r"Expected `experiences` to be given but got None. Leave it out for 5."):
        ClassIncremental(experiences=None)
    assert ClassIncremental(samples_per_round=None, class_order=None).experiences == 5
