"""Tests of the text and the charts that summarize a plan."""

import numpy as np
import pytest

from lightning_fcl.cli.main import main
from lightning_fcl.data.plan_summary import describe_plan, plot_plan
from lightning_fcl.data.scenarios import ClassIncremental, Delayed, DomainIncremental, FedViTScenario, SamplePool

Y = np.random.default_rng(0).integers(6, size=600)
POOL = SamplePool(
    Y, clients={c: np.arange(n, 600, 3) for n, c in enumerate("xyz")}, classes=tuple("abcdef"), group=Y % 2
)
SCENARIOS = [
    ClassIncremental(3, 2),
    DomainIncremental(),
    Delayed(ClassIncremental(3, 2), 2),
    FedViTScenario(2, 3, [2, 3]),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_plot_plan_counts_every_sample(scenario):
    pool = SamplePool(Y, np.arange(600), classes=POOL.classes) if scenario.provides_clients else POOL
    plan = scenario.plan(pool)
    data = plot_plan(plan, POOL.classes)["datasets"]
    for number, current in enumerate(plan.train):
        assert sum(row["samples"] for row in data["by_round"] if row["round"] == number + 1) == sum(
            map(len, current.values())
        )
        cells = {row["client"]: (row["task"], row["samples"]) for row in data["tasks"] if row["round"] == number + 1}
        assert cells == {c: (plan.experiences[c][number] + 1, len(rows)) for c, rows in current.items()}
    for client in plan.clients:
        assert sum(row["samples"] for row in data["by_client"] if row["client"] == client) == plan.num_client_samples(
            client
        )
    names = {*POOL.classes} if plan.groups_are_classes else {"0", "1"}
    assert {row["group"] for row in data["by_round"]} == names


def test_describe_plan_has_one_line_per_change():
    text = describe_plan(ClassIncremental(3, 2, class_order=list("fedcba")).plan(POOL), POOL.classes)
    head, _, *lines = text.splitlines()
    assert head == "6 rounds, 3 clients with 600 samples, 0 to test, 0 to validate"
    assert [line.split()[:2] + line.split()[3:] for line in lines] == [
        ["1", "3", "e,", "f", "-"],
        ["3", "3", "c,", "d", "-"],
        ["5", "3", "a,", "b", "-"],
    ]


def test_plan_summary_of_long_plan_is_truncated():
    pool = SamplePool(Y, clients={str(n): np.arange(n, 600, 100) for n in range(100)}, classes=POOL.classes)
    plan = Delayed(ClassIncremental(6, 50), max_delay=90).plan(pool)
    assert len(describe_plan(plan, POOL.classes).splitlines()) == 33
    data = plot_plan(plan, POOL.classes)["datasets"]
    rounds = {row["round"] for row in data["by_round"]}
    assert len(rounds) == 120 and max(rounds) == plan.num_rounds and len({row["client"] for row in data["tasks"]}) == 60


def test_data_show_prints_plan_and_writes_image(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["data", "show", "quickstart", "--data.scenario", "GrowingClasses", "--out", "stream.png"])
    out = capsys.readouterr().out
    assert "scenario GrowingClasses" in out and out.endswith("stream.png\n")
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [
        tmp_path / "stream.png"
    ]
