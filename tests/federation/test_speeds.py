"""How fast clients are: typical, drawn, or their own numbers."""

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


def test_a_time_is_the_sum_of_its_parts():
    speed = Speed(0.25, upload_bandwidth=100, download_bandwidth=1000, latency=2)
    assert speed.seconds(8, 500, 500) == 2 + 0.5 + 2 + 5
    assert Speed(0.25).seconds(8, 10**9, 10**9) == 2  # no bandwidth: sending takes no time


def test_what_is_drawn_depends_on_seed_client_and_round_alone():
    speeds = ClientSpeeds(0.1, 1000, 1000, latency=1, spread=0.5, variation=0.3)
    again = ClientSpeeds(0.1, 1000, 1000, latency=1, spread=0.5, variation=0.3)
    asked = [(client, round_idx) for client in "abc" for round_idx in range(3)]
    first = {key: speeds.seconds(*key, 4, 10, 100, 100) for key in asked}
    assert {key: again.seconds(*key, 4, 10, 100, 100) for key in reversed(asked)} == first
    assert len(set(first.values())) == len(asked)
    assert speeds.for_client("a", 4) == again.for_client("a", 4) != again.for_client("a", 5)
    assert speeds.seconds("a", 0, 4, 10, 100, 100) != speeds.seconds("a", 0, 5, 10, 100, 100)


def test_factors_are_log_normal_with_median_one():
    speeds = ClientSpeeds(1.0, upload_bandwidth=1.0, spread=0.5)
    drawn = [speeds.for_client(str(client), 0) for client in range(4000)]
    compute, send = ([math.log(getattr(one, of)) for one in drawn] for of in ("seconds_per_sample", "upload_bandwidth"))
    for logs in (compute, send):
        assert abs(statistics.fmean(logs)) < 0.05 and abs(statistics.stdev(logs) - 0.5) < 0.05
    assert abs(statistics.fmean(log > 0.5 for log in compute) - 0.159) < 0.03  # one in six, as the docstring says
    assert abs(statistics.correlation(compute, send)) < 0.1


def test_the_variation_of_rounds_is_that_of_the_whole_time():
    still, varying = ClientSpeeds(0.1, latency=1), ClientSpeeds(0.1, latency=1, variation=0.4)
    logs = [math.log(varying.seconds("a", r, 0, 10, 0, 0) / still.seconds("a", r, 0, 10, 0, 0)) for r in range(2000)]
    assert abs(statistics.fmean(logs)) < 0.05 and abs(statistics.stdev(logs) - 0.4) < 0.05


@pytest.mark.parametrize(("name", "text", "other"), [("speeds.csv", CSV, "b"), ("speeds.yaml", YAML, "7")])
def test_numbers_of_clients_own_come_from_a_file_or_a_mapping(tmp_path, name, text, other):
    path = tmp_path / name
    path.write_text(text)
    speeds = ClientSpeeds(
        0.1, spread=0.5, path=str(path), per_client={"a": {"latency": 1}, "c": {"seconds_per_sample": 9}}
    )
    assert speeds.for_client("a", 0) == Speed(0.5, latency=1)  # the mapping goes over the file
    assert speeds.for_client(other, 0) == Speed(0.1, upload_bandwidth=2000)  # whoever has a number is typical otherwise
    assert speeds.for_client("c", 0).seconds_per_sample == 9
    assert speeds.for_client("d", 0).seconds_per_sample != 0.1  # the spread is of all others
    assert sorted(speeds.explicit_clients) == sorted(["a", other, "c"])


def test_speeds_are_told_apart_by_a_checkpoint():
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


def test_every_client_has_a_time_for_its_samples():
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
def test_what_is_no_speed_is_refused_by_name(arguments, argument):
    with raises(InvalidValueError, argument):
        ClientSpeeds(**arguments)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "client,speed\na,1\n", "Expected the speed of client a to map names from seconds_per_sample.* .*'speed': '1'"),
        ("a.csv", "latency\n1\n", "Expected a column `client`, .*a.csv"),
        ("a.csv", "", "Expected .*a.csv to have lines but it is empty"),
        ("a.csv", "client,latency\na,1\na,2\n", "Expected each client once in .* but a appears more than once"),
        ("a.csv", "client,latency\na,fast\n", "Expected the speed of client a to map names .* but got .*'latency': 'fast'"),
        ("a.csv", "client,latency\na,1,2\n", "Expected a column `client`, and no more cells than columns, in .*a.csv"),
        ("a.csv", "client,latency\n\xe9,1\n", "Expected .*a.csv to be a text file but got: 'utf-8' codec"),
        ("a.yaml", "- a\n", "to map clients to their speeds"),
        ("a.yaml", "a: !!python/object:os.system {}", "to be YAML"),
    ],
)
def test_a_file_that_is_none_of_speeds_is_refused_by_name(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        ClientSpeeds(0.1, path=str(path))


@pytest.mark.parametrize("name", ["no.csv", "no.yaml"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    with raises(MissingFileError, value=tmp_path / name):
        ClientSpeeds(0.1, path=str(tmp_path / name))
