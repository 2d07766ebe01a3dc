"""Tests of client speeds: typical, random, or given for single clients."""

import math
import statistics

import pytest
from raising import raises

from lightning_fcl.errors import InvalidValueError, MissingFileError, MissingValueError
from lightning_fcl.federation.client_speeds import ClientSpeeds, Speed

CSV = """client,seconds_per_sample,upload_bandwidth,latency
a,0.5,,3
b,,2000,
"""
YAML = "a: {seconds_per_sample: 0.5, latency: 3}\n7: {upload_bandwidth: 2e3}\n"


def test_speed_seconds_is_sum_of_parts():
    speed = Speed(0.25, upload_bandwidth=100, download_bandwidth=1000, latency=2)
    assert speed.seconds(8, 500, 500) == 2 + 0.5 + 2 + 5
    # Without bandwidths, transfers take no time.
    assert Speed(0.25).seconds(8, 10**9, 10**9) == 2


def test_random_speeds_depend_only_on_seed_client_and_round():
    speeds = ClientSpeeds(0.1, 1000, 1000, latency=1, spread=0.5, variation=0.3)
    again = ClientSpeeds(0.1, 1000, 1000, latency=1, spread=0.5, variation=0.3)
    asked = [(client, round_idx) for client in "abc" for round_idx in range(3)]
    first = {key: speeds.seconds(*key, 4, 10, 100, 100) for key in asked}
    assert {key: again.seconds(*key, 4, 10, 100, 100) for key in reversed(asked)} == first
    assert len(set(first.values())) == len(asked)
    assert speeds.for_client("a", 4) == again.for_client("a", 4) != again.for_client("a", 5)
    assert speeds.seconds("a", 0, 4, 10, 100, 100) != speeds.seconds("a", 0, 5, 10, 100, 100)


def test_spread_factors_are_log_normal_with_median_one():
    speeds = ClientSpeeds(1.0, upload_bandwidth=1.0, spread=0.5)
    drawn = [speeds.for_client(str(client), 0) for client in range(4000)]
    compute, send = ([math.log(getattr(one, of)) for one in drawn] for of in ("seconds_per_sample", "upload_bandwidth"))
    for logs in (compute, send):
        assert abs(statistics.fmean(logs)) < 0.05 and abs(statistics.stdev(logs) - 0.5) < 0.05
    # The share 0.159 is about one client in six, as the docstring of `ClientSpeeds` states.
    assert abs(statistics.fmean(log > 0.5 for log in compute) - 0.159) < 0.03
    assert abs(statistics.correlation(compute, send)) < 0.1


def test_variation_multiplies_whole_time():
    still, varying = ClientSpeeds(0.1, latency=1), ClientSpeeds(0.1, latency=1, variation=0.4)
    logs = [math.log(varying.seconds("a", r, 0, 10, 0, 0) / still.seconds("a", r, 0, 10, 0, 0)) for r in range(2000)]
    assert abs(statistics.fmean(logs)) < 0.05 and abs(statistics.stdev(logs) - 0.4) < 0.05


@pytest.mark.parametrize(("name", "text", "other"), [("speeds.csv", CSV, "b"), ("speeds.yaml", YAML, "7")])
def test_client_speeds_from_file_and_mapping(tmp_path, name, text, other):
    path = tmp_path / name
    path.write_text(text)
    speeds = ClientSpeeds(
        0.1, spread=0.5, path=str(path), per_client={"a": {"latency": 1}, "c": {"seconds_per_sample": 9}}
    )
    # `per_client` overrides the file. Values that are not given are typical.
    assert speeds.for_client("a", 0) == Speed(0.5, latency=1)
    assert speeds.for_client(other, 0) == Speed(0.1, upload_bandwidth=2000)
    assert speeds.for_client("c", 0).seconds_per_sample == 9
    # The spread applies to clients without explicit values.
    assert speeds.for_client("d", 0).seconds_per_sample != 0.1
    assert sorted(speeds.explicit_clients) == sorted(["a", other, "c"])


def test_fingerprint_differs_for_different_speeds():
    own = [
        ClientSpeeds(0.1, per_client={"a": {"latency": 1}, "b": {"latency": late}}).fingerprint()
        for late in (2, 2.0, 3)
    ]
    assert own[0] == own[1] != own[2]
    turned = ClientSpeeds(0.1, per_client={"b": {"latency": 2}, "a": {"latency": 1}})
    assert turned.fingerprint() == own[0]
    assert (
        ClientSpeeds(0.1).fingerprint()
        != ClientSpeeds(0.1, spread=0.1).fingerprint()
        != ClientSpeeds(0.2, spread=0.1).fingerprint()
    )


def test_check_clients_without_seconds_per_sample_raises():
    speeds = ClientSpeeds(per_client={"a": {"seconds_per_sample": 1}, "b": {"latency": 1}})
    speeds.check_clients(("a",))
    with pytest.raises(MissingValueError, check=lambda error: error.argument == "seconds_per_sample"):
        speeds.check_clients(("a", "b", "c"))


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"seconds_per_sample": -1}, "seconds_per_sample"),
        (
            {"seconds_per_sample": math.nan},
            "seconds_per_sample",
        ),
        ({"upload_bandwidth": 0}, "upload_bandwidth"),
        ({"download_bandwidth": math.inf}, "download_bandwidth"),
        ({"latency": -1}, "latency"),
        ({"spread": -0.1}, "spread"),
        ({"per_client": {"a": {"latencies": 3}}}, "a"),
        ({"per_client": {"a": {"latency": -3}}}, "a"),
    ],
)
def test_client_speeds_invalid_value_raises_with_name(arguments, argument):
    with raises(InvalidValueError, argument):
        ClientSpeeds(**arguments)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "client,speed\na,1\n",
            "Expected the speed of client a to be a dict of numbers with some of the keys seconds_per.* .*'speed': '1'",
        ),
        ("a.csv", "latency\n1\n", "Expected each row of .*a.csv to have a column `client`"),
        ("a.csv", "", "Expected .*a.csv to have at least one non-empty line, but got none"),
        ("a.csv", "client,latency\na,1\na,2\n", "Expected each client once in .* but a appears more than once"),
        (
            "a.csv",
            "client,latency\na,fast\n",
            "Expected the speed of client a to be a dict of numbers .* but got .*'latency': 'fast'",
        ),
        (
            "a.csv",
            "client,latency\na,1,2\n",
            "Expected each row of .*a.csv to have a column `client`, and no more cells than columns, but",
        ),
        ("a.csv", "client,latency\n\xe9,1\n", "Expected .*a.csv to be a text file but got: 'utf-8' codec"),
        ("a.yaml", "- a\n", "to map clients to their speeds"),
        ("a.yaml", "a: !!python/object:os.system {}", "to be YAML"),
    ],
)
def test_client_speeds_invalid_file_raises_with_reason(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        ClientSpeeds(0.1, path=str(path))


@pytest.mark.parametrize("name", ["no.csv", "no.yaml"])
def test_client_speeds_missing_file_raises_with_path(tmp_path, name):
    with raises(MissingFileError, value=tmp_path / name):
        ClientSpeeds(0.1, path=str(tmp_path / name))
