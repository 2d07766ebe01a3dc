"""Tests of nodes with unexpected client names, and of clocks that differ, on a real SuperLink."""

import re
import time
from types import SimpleNamespace

import pytest

from lightning_fcl.cli.main import main
from lightning_fcl.deployment import clock

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NAMES = {"0": "plant-a", "1": "plant-b", "2": "plant-c"}


@pytest.fixture
def linked(rehearsal, machines):
    """Return a recipe of one round, and a SuperLink whose SuperNodes use client names that the recipe does not have."""
    one, at = rehearsal({"trainer": {"max_epochs": 1}}), machines()
    one.simulate()
    at.link()
    at.connect()
    for client, name in NAMES.items():
        data = one.folder / "data" / f"{client}.npz"
        at.node(name, f'client="{name}" data="{data}" state-dir="{one.folder / "memories"}"')
    return one, at


def test_flwr_run_stream_shows_ignored_nodes_setting_and_rounds(linked):
    one, at = linked
    app = one.app()
    settings = {"out": str(one.folder / "deployed"), "min-clients": 3, "join-timeout": 150}
    said = at.stream(app, settings)
    assert "WARNING Waiting for 3 more of the clients 0, 1, 2 to join." in said
    for name in NAMES.values():
        assert re.search(
            rf"WARNING Ignored node \d+ \(client {name}\): Expected node \d+ to be one of the clients", said
        )
    expected = "Expected at least 3 of the clients 0, 1, 2 to join within 150 s, but none joined. Ignored 3 connected"
    assert expected in said
    # The first lists may lack a node that connects late. The last list, after the waiting time, is complete.
    listed = re.findall(
        r"To train the clients of these nodes, set `data` and clients=\"(.*?)\" in the run configuration", said
    )
    assert listed[-1:] == ["plant-a,plant-b,plant-c"]
    settings |= {"clients": listed[-1], "data": str(one.folder / "data" / "server.npz"), "join-timeout": 900}
    said = at.stream(app, settings)
    for name in NAMES.values():
        assert re.search(rf"INFO Client {name} joined on node \d+\. Number of training samples: \d+\.", said)
    assert "INFO Round 0 began. Number of sampled clients: 3." in said
    assert "INFO Round 0 ended with answers of 3 of 3 sampled clients" in said
    assert f"INFO Finished the run. The results are in {one.folder / 'deployed'}." in said
    assert one.ended()


def test_deploy_clock_compares_clock_with_superlink(machines, error_of, monkeypatch, capsys, tmp_path):
    at = machines()
    words = ["deploy", "clock", "--superlink", at.address, "--insecure"]
    assert f"Expected a SuperLink at {at.address}, but the connection failed" in error_of(words)
    at.link()
    main(words)
    assert re.search(r"SuperLink: [+-]\d+ s\. Flower accepts this difference\.", capsys.readouterr().out)
    for seconds, side in ((10, "ahead"), (-400, "behind")):
        shifted = SimpleNamespace(time=lambda seconds=seconds: time.time() + seconds)
        monkeypatch.setattr(clock, "time", shifted)
        found = re.search(r"clock is about (\d+) s (ahead|behind)\. The SuperLink can reject", error_of(words))
        assert found and abs(int(found[1]) - abs(seconds)) <= 3 and found[2] == side
    assert "--superlink 127.0.0.1:18000" in error_of(["deploy", "clock"])
