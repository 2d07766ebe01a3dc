"""A SuperLink and SuperNodes as processes on loopback, with a process that stays beside each node."""

import csv
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

import lightning_fcl

from .recipes import REPLAY

PAGE = Path(lightning_fcl.__file__).parents[1] / "docs" / "deploy.md"

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def connected(connect):
    one, simulated, at = connect(REPLAY)
    yield one, simulated, at
    at.close()


def test_superlink_and_three_supernodes_end_in_the_bits_of_the_simulation(connected):
    one, simulated, at = connected
    at.run(one.app(), **one.settings(), clients_at_least=3)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)


def test_flowers_own_simulation_runs_the_same_app(rehearsal, machines):
    pytest.importorskip("ray")
    one, at = rehearsal(REPLAY), machines()
    simulated = one.simulate()
    at.link("--simulation")
    more = {"data_folder": str(one.folder / "data"), "memories": str(one.folder / "memories"), "clients_at_least": 3}
    at.run(one.app(), "options.num-supernodes = 3", **one.settings(), **more)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)


def test_a_supernode_and_the_superlink_killed_and_started_again_end_in_the_same_bits(connected):
    """The SuperNode in the midst of a task: it goes on with its memory. The SuperLink: from its server's checkpoint."""
    one, simulated, at = connected
    settings = {**one.settings(), "clients_at_least": 3, "round_seconds": 20.0, "join_seconds": 120.0}
    at.run(one.app(), **settings)
    at.wait_for(lambda: one.begun("1") >= 1)
    at.kill("link")
    for name in ("1", "1-stays"):
        at.kill(name)
    assert not one.ended()
    at.link()
    at.node("1", one.config("1"))
    at.run(one.app(), **settings)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)


def test_a_supernode_that_stalls_does_not_stop_the_round(connected):
    one, _, at = connected
    settings = {**one.settings(), "clients_at_least": 2, "round_seconds": 8.0}
    at.run(one.app(), **settings)
    at.wait_for(lambda: one.begun("2") >= 0)
    at.signal("2", signal.SIGSTOP)
    at.wait_for(one.ended)
    with (one.folder / "deployed" / "metrics.csv").open() as file:
        last = {row["model"]: row["upload_bytes"] for row in csv.DictReader(file) if row["round"] == "3"}
    assert last["0"] and last["1"] and not last["2"]


def made(folder, program, node="0"):
    """A folder with what a program of the page makes: certificates, or the keys of a node."""
    folder.mkdir(exist_ok=True)
    for line in re.findall(rf"^{program} .*$", PAGE.read_text(), re.MULTILINE):
        subprocess.run(shlex.split(line.replace("node0", f"node{node}")), cwd=folder, check=True, capture_output=True)
    return folder


def test_nodes_that_are_known_train_behind_certificates_and_no_others(rehearsal, machines, tmp_path):
    """Who does not trust the certificate of the SuperLink, and who has a key that nobody registered, never come in."""
    one = rehearsal()
    simulated = one.simulate()
    ours, others = (made(tmp_path / whose, "openssl") for whose in ("ours", "others"))
    authority, certificate, key = (ours / name for name in ("ca.pem", "link.pem", "link.key"))
    served = ("--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    at = machines((*served, "--enable-supernode-auth"), ("--root-certificates", authority))
    at.link()
    at.connect()
    for client in one.clients:
        secret = made(tmp_path / "keys", "ssh-keygen", client) / f"node{client}.key"
        at.flwr("supernode", "register", f"{secret}.pub", "here")
        at.node(client, one.config(client), "--auth-supernode-private-key", secret)
    secret = made(tmp_path / "stranger", "ssh-keygen") / "node0.key"
    at.node("stranger", one.config("0"), "--auth-supernode-private-key", secret)
    at.trust = ["--root-certificates", others / "ca.pem"]
    at.node("mistrusts", one.config("0"), "--auth-supernode-private-key", secret)
    at.trust = ["--root-certificates", authority]
    at.run(one.app(), **one.settings(), clients_at_least=3)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)
    said = {name: (tmp_path / f"{name}.log").read_text().lower() for name in ("stranger", "mistrusts", "link")}
    assert "certificate" in said["mistrusts"] and "train message" not in said["mistrusts"]
    assert "train message" not in said["stranger"]
