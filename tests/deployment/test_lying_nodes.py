"""Tests that malicious SuperNodes do not change the model.

The SuperNodes send each kind of invalid answer over a real SuperLink.
"""

import re
import shutil
from pathlib import Path

import pytest

from . import lies
from .lies import KINDS
from .recipes import classes

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.long]

LIARS = ["1", "3", "4", "5", "6"]

ROUNDS = -(-len(KINDS) // len(LIARS))

CLIENT = f'''"""A node that sends another kind of invalid answer in each round, if its client is malicious."""

import sys
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

sys.path.append(str(Path(__file__).parent))

from lightning_fcl.deployment.upload_validation import HEADER_FIELDS
from lightning_fcl.deployment.flower import client_app
from lightning_fcl.deployment.messages import Parcel, unpack

import lies

honest = client_app(Path(__file__).parent)
app = ClientApp()


@app.query()
def greet(message, context):
    return honest(message, context)


@app.train()
def train(message, context):
    client = context.node_config["client"]
    if client not in {LIARS}:
        return honest(message, context)
    sent = unpack(message.content)
    said = dict((name, sent.header[name]) for name in HEADER_FIELDS)
    said.update(client=client, samples=9, rehearsed=0, diverged=False)
    state = dict((name.removeprefix("model/"), value + 0.01) for name, value in sent.state.items())
    change, _ = list(lies.KINDS.values())[(said["round"] * {len(LIARS)} + {LIARS}.index(client)) % {len(KINDS)}]
    return Message(change(lies.Message.of(Parcel(said, state))).record(), reply_to=message)
'''

MANY_ROUNDS = {
    "trainer": {"max_epochs": ROUNDS},
    "data": {
        "scenario": classes(num_experiences=1, rounds_per_experience=ROUNDS),
        "partition": {"class_path": "IID", "init_args": {"num_clients": 7}},
    },
}


def test_invalid_answers_over_superlink_are_logged_and_change_nothing(rehearsal, wire, machines):
    one, at = rehearsal(MANY_ROUNDS), machines()
    one.simulate("--trainer.max_epochs", "1")
    honest = one.serve(wire([one.node("0"), one.node("2")]), min_clients=2)
    (one.folder / "deployed").rename(one.folder / "honest")
    app = one.app()
    (app / "client_app.py").write_text(CLIENT)
    shutil.copy(Path(lies.__file__), app)
    at.hasten(10)
    at.link()
    for client in one.clients:
        at.node(client, one.config(client))
    at.run(app, **one.settings(), min_clients=2)
    at.wait_for(one.ended, seconds=900)
    assert one.holds(honest.model)
    rounds = one.rounds()
    assert len(rounds) == ROUNDS
    for number, (kind, (_, message)) in enumerate(KINDS.items()):
        dropped = rounds[number // len(LIARS)]["dropped"]
        client = LIARS[number % len(LIARS)]
        assert re.search(message.replace("client 1 ", f"client {client} "), dropped[client]), (kind, dropped)
