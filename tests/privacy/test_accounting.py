"""Tests of the accountant: known values, the closed form of Gaussian releases, calibration and the ledger."""

import json
import math
import sys
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raising import raises
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_fcl.errors import DamagedFileError, InvalidStateError, InvalidValueError, MissingPackageError
from lightning_fcl.privacy import accounting
from lightning_fcl.privacy.accounting import Release, check_delta, compute_epsilon, find_noise_multiplier, max_releases
from lightning_fcl.privacy.ledger import Charge, PrivacyLedger


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling_prob", "number", "pld", "rdp"),
    [
        (4, 0.01, 10_000, 0.947, 1.0355),
        (1.1, 256 / 60_000, 14_062, 2.382, 2.597),
        (0.7, 256 / 60_000, 10_546, 5.639, 6.320),
        (1.3, 256 / 60_000, 3_515, 0.865, 0.954),
        (3.7306, 1, 1, 1.000, 1.093),
        (1.5, 0.04, 2_250, 6.769, 7.329),
    ],
)
def test_epsilon_equals_published_values(noise_multiplier, sampling_prob, number, pld, rdp):
    releases = [Release(noise_multiplier, sampling_prob)] * number
    assert compute_epsilon(releases, 1e-5) == pytest.approx(pld, rel=0.01)
    assert compute_epsilon(releases, 1e-5, "rdp") == pytest.approx(rdp, rel=1e-3)


def gaussian_epsilon(noise_multiplier, number, delta):
    """Return epsilon of Gaussian releases without sampling, by the exact formula (Balle and Wang, 2018, theorem 8)."""
    mu = math.sqrt(number) / noise_multiplier

    def excess(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0, 100)


@pytest.mark.parametrize(("noise_multiplier", "number"), [(1.0, 1), (3.0, 10), (8.0, 50), (1.5, 7)])
def test_epsilon_of_gaussian_releases_equals_closed_form(noise_multiplier, number):
    exact = gaussian_epsilon(noise_multiplier, number, 1e-6)
    found = compute_epsilon([Release(noise_multiplier)] * number, 1e-6)
    assert exact * (1 - 1e-9) <= found <= exact * 1.01
    assert compute_epsilon([Release(noise_multiplier)] * number, 1e-6, "rdp") >= exact


def test_epsilon_does_not_depend_on_order_and_is_zero_without_releases():
    first, second = Release(2.0, 0.1), Release(5.0)
    assert compute_epsilon([first, second, first], 1e-5) == compute_epsilon([second, first, first], 1e-5)
    assert compute_epsilon([first, second], 1e-5) > compute_epsilon([first], 1e-5)
    assert compute_epsilon([], 1e-5) == 0.0


@settings(max_examples=15, deadline=None)
@given(st.floats(0.2, 10), st.floats(1e-7, 1e-3), st.integers(1, 60), st.sampled_from([0.05, 0.5, 1.0]), st.just("rdp"))
@example(1.0, 1e-5, 20, 0.3, "pld")
@example(6.0, 1e-5, 5, 1.0, "pld")
def test_calibrated_noise_never_exceeds_budget(epsilon, delta, number, sampling_prob, accountant):
    multiplier = find_noise_multiplier(epsilon, delta, number, sampling_prob, accountant)
    assert compute_epsilon([Release(multiplier, sampling_prob)] * number, delta, accountant) <= epsilon
    assert compute_epsilon([Release(multiplier - 2e-4, sampling_prob)] * number, delta, accountant) > epsilon


def test_max_releases_is_the_largest_number_within_budget():
    release, earlier = Release(6.0, 0.5), Counter({Release(9.0): 3})
    number = max_releases(2.0, 1e-5, release, 100, earlier)
    before = [*earlier.elements()]
    assert 0 < number < 100
    assert compute_epsilon([*before, *[release] * number], 1e-5) <= 2.0
    assert compute_epsilon([*before, *[release] * (number + 1)], 1e-5) > 2.0
    assert max_releases(2.0, 1e-5, release, number - 1, earlier) == number - 1
    assert max_releases(0.1, 1e-5, release, 100, earlier) == 0


def test_delta_must_be_below_one_by_number_of_units():
    check_delta(0.0099, 100)
    with raises(InvalidValueError, "delta"):
        check_delta(0.01, 100)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_missing_package_names_the_extra(monkeypatch, accountant):
    for name in [name for name in sys.modules if name.partition(".")[0] == "dp_accounting"] + ["dp_accounting"]:
        monkeypatch.setitem(sys.modules, name, None)
    for cached in (accounting._epsilon, accounting._loss_distribution):
        cached.cache_clear()
    with raises(MissingPackageError, value="dp_accounting"):
        find_noise_multiplier(1.0, 1e-5, 1, accountant=accountant)


def make_charge(round_idx=0, settings="a", noise_multiplier=1.5, sampling_prob=1.0, unit="client", max_uses=10):
    return Charge(round_idx, settings, noise_multiplier, sampling_prob, unit, max_uses)


# Changes of a line that make it invalid.
CHANGES = (
    {"round": -1},
    {"round": 0.5},
    {"settings": 3},
    {"noise_multiplier": 0},
    {"noise_multiplier": float("nan")},
    {"sampling_prob": 2},
    {"unit": None},
    {"max_uses": "all"},
    {"other": 1},
)


def test_ledger_counts_each_unit_at_most_max_uses_times_per_run():
    ledger = PrivacyLedger()
    for name, max_uses in (("a", 2), ("b", 9)):
        for round_idx in range(5):
            ledger.charge(make_charge(round_idx, name, max_uses=max_uses))
    assert ledger.counts() == {Release(1.5): 7} and ledger.counts(other_than="a") == {Release(1.5): 5}


def test_ledger_charges_repeated_release_once_and_survives_a_restart(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = PrivacyLedger(path)
    charges = [make_charge(0, "a", 1.5, 0.5), make_charge(1, "a", 1.5, 0.5), make_charge(0, "b", 2.0, 1.0)]
    assert [ledger.charge(charge) for charge in [*charges, charges[0]]] == [True, True, True, False]
    with path.open("ab") as file:  # A power failure during a write leaves a part of a line.
        file.write(b'{"round": 2, "sett')
    again = PrivacyLedger(path)
    assert [*again.charges] == charges
    assert again.counts() == {Release(1.5, 0.5): 2, Release(2.0): 1} and again.counts("a") == {Release(2.0): 1}
    assert not again.charge(charges[1]) and again.charge(make_charge(2, "a", 1.5, 0.5))
    assert len(PrivacyLedger(path)) == 4 and path.read_bytes().count(b"\n") == 4


def test_only_the_writer_changes_the_file(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert PrivacyLedger(path, is_writer=False).charge(make_charge()) and not path.exists()


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"{}",
        b"[]",
        *(json.dumps(asdict(make_charge()) | change).encode() for change in CHANGES),
    ],
)
def test_damaged_ledger_raises(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    PrivacyLedger(path).charge(make_charge())
    path.write_bytes(line + b"\n" + path.read_bytes())
    with raises(DamagedFileError, value=path):
        PrivacyLedger(path)


def test_ledger_without_releases_of_checkpoint_raises(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    ledger.charge(make_charge())
    ledger.check_contains(1, "a")
    with raises(InvalidStateError, "ledger"):
        ledger.check_contains(1, "b")
