"""A recipe on Flower as the page tells: in its simulation, and on SuperNodes that are known, behind certificates."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import lightning_fcl

from .recipes import REPLAY

PAGE = Path(lightning_fcl.__file__).parents[1] / "docs" / "deploy.md"

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_flowers_own_simulation_runs_the_same_app(rehearsal, machines):
    pytest.importorskip("ray")
    one, at = rehearsal(REPLAY), machines()
    simulated = one.simulate()
    at.link("--simulation")
    more = {"data_folder": str(one.folder / "data"), "state_dir": str(one.folder / "memories"), "min_clients": 3}
    at.run(one.app(), "options.num-supernodes = 3", **one.settings(), **more)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)


def made(folder, program, node="0"):
    """A folder with what a program of the page makes: certificates, or the keys of a node."""
    folder.mkdir(exist_ok=True)
    for line in re.findall(rf"^{program} .*$", PAGE.read_text(), re.MULTILINE):
        subprocess.run(shlex.split(line.replace("node0", f"node{node}")), cwd=folder, check=True, capture_output=True)
    return folder


def test_nodes_that_are_known_train_behind_certificates_and_no_others(rehearsal, machines, tmp_path):
    """They end in the bits of the simulation, of which one has a process beside it as the page starts it.

    Who does not trust the certificate of the SuperLink, and who has a key that nobody registered, never come in.
    """
    one = rehearsal(REPLAY)
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
        at.supernode(client, one.config(client), "--auth-supernode-private-key", secret)
        (at.own_executor if client == one.clients[0] else at.executor)(client)
    secret = made(tmp_path / "stranger", "ssh-keygen") / "node0.key"
    at.node("stranger", one.config("0"), "--auth-supernode-private-key", secret)
    at.trust = ["--root-certificates", others / "ca.pem"]
    at.node("mistrusts", one.config("0"), "--auth-supernode-private-key", secret)
    at.trust = ["--root-certificates", authority]
    at.run(one.app(), **one.settings(), min_clients=3, require_registered_keys=True)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)
    said = {name: (tmp_path / f"{name}.log").read_text().lower() for name in ("stranger", "mistrusts", "link")}
    assert "certificate" in said["mistrusts"] and "train message" not in said["mistrusts"]
    assert "train message" not in said["stranger"]
