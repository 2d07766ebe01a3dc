"""Tests of the connection to the nodes over Flower: the sender of each answer, and the identity of each node."""

import threading
import time

import pytest
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message
from flwr.supercore.task_identity import TaskIdentity

from lightning_fcl.deployment.messages import GridLink, Parcel, to_record, unpack


class Grid:
    """A replacement for Flower's grid. The function `answers` returns the answer to each message."""

    def __init__(self, answers):
        self.sent, self.answers = {}, answers

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"id-{number}"
            self.sent[f"id-{number}"] = message
        return ["" if message.metadata.dst_node_id == 99 else name for name, message in self.sent.items()]

    def pull_messages(self, names):
        return [self.answers(self.sent[name]) for name in names if self.answers(self.sent[name]) is not None]


@pytest.fixture
def app(monkeypatch):
    """Give this process the task identity of Flower's server, so that the process can make messages."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def answer_of(message, said, **forged):
    reply = Message(to_record(Parcel({"said": said})), reply_to=message)
    reply.metadata.__dict__.update({f"_{name}": value for name, value in forged.items()})
    return reply


def test_nodes_are_identified_by_public_key():
    class Known:
        def get_nodes(self):
            return [
                NodeInfo(node_id=number, public_key=key) for number, key in ((7, b"a"), (8, b"a"), (9, b"b"), (10, b""))
            ]

    keys = GridLink(Known()).nodes()
    assert [*keys] == [7, 8, 9, 10] and keys[7] == keys[8]
    assert len({*keys.values()}) == 3


def test_answers_ignore_forged_sender_and_message(app):
    """The SuperLink itself reports nodes that are gone. A node can write any sender into its own answer."""

    def answers(message):
        node = message.metadata.dst_node_id
        if node == 7:
            return create_message_error_unavailable_res_message(message.metadata, "node_unavail")
        if node == 11:
            # Flower raises an error if the bytes of a message are unreadable.
            raise ValueError("no message")
        forged = {"reply_to_message_id": "id-0", "src_node_id": 7} if node == 8 else {}
        return None if node == 10 else answer_of(message, f"I am {node}", **forged)

    link = GridLink(Grid(answers))
    sent = link.send({node: Parcel({"kind": "hello"}) for node in (7, 8, 9, 10, 11, 99)}, 60)
    assert [*sent.values()] == [7, 8, 9, 10, 11]
    found = {sent[message]: answer for message, answer in link.answers(sent)}
    assert found.keys() == {7, 8, 9, 11}
    assert "Expected a readable answer, but got ValueError: no message" in found[11]
    assert "Node Unavailable" in found[7]
    assert [unpack(found[node]).header["said"] for node in (8, 9)] == ["I am 8", "I am 9"]


def test_incomplete_answer_does_not_delay_other_answers(app, monkeypatch):
    """If a sender was killed while it sent an answer, Flower waits minutes for the rest of the answer."""
    monkeypatch.setattr("lightning_fcl.deployment.messages._PATIENCE", 0.2)
    rest = threading.Event()

    def answers(message):
        node = message.metadata.dst_node_id
        assert node != 7 or rest.wait(60)
        return answer_of(message, f"I am {node}")

    link = GridLink(Grid(answers))
    sent = link.send({node: Parcel({"kind": "hello"}) for node in (7, 8)}, 60)
    assert [sent[message] for message, _ in link.answers(sent)] == [8]
    left = [message for message, node in sent.items() if node == 7]
    began = time.monotonic()
    assert [*link.answers(left)] == [] and time.monotonic() - began < 0.2
    rest.set()
    while not (found := [*link.answers(left)]):
        assert time.monotonic() - began < 60
    [(message, answer)] = found
    assert message == left[0] and unpack(answer).header["said"] == "I am 7"
