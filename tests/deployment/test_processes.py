"""Tests of a recipe in Flower's simulation, and on SuperNodes with registered keys and TLS, as in docs/deploy.md."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import lightning_fcl

from .recipes import REPLAY

PAGE = Path(lightning_fcl.__file__).parents[1] / "docs" / "deploy.md"

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_app_in_flower_simulation_equals_simulation(rehearsal, machines):
    pytest.importorskip("ray")
    one, at = rehearsal(REPLAY), machines()
    simulated = one.simulate()
    at.link("--simulation")
    more = {"data_folder": str(one.folder / "data"), "state_dir": str(one.folder / "memories"), "min_clients": 3}
    at.run(one.app(), "options.num-supernodes = 3", **one.settings(), **more)
    at.wait_for(one.ended)
    assert one.holds(simulated.model)


def made(folder, program, node="0"):
    """Make certificates or keys in a folder, and return the folder.

    The commands are all lines of the page that start with ``program``.
    """
    folder.mkdir(exist_ok=True)
    for line in re.findall(rf"^{program} .*$", PAGE.read_text(), re.MULTILINE):
        subprocess.run(shlex.split(line.replace("node0", f"node{node}")), cwd=folder, check=True, capture_output=True)
    return folder


def test_only_registered_supernodes_train_with_tls(rehearsal, machines, tmp_path):
    """The result is identical to the simulation. One SuperNode uses the executor command from the page.

    A SuperNode that does not trust the SuperLink's certificate, or whose key is not registered, gets no message.
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
