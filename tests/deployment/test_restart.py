"""Tests of a server that resumes from its newest checkpoint, nodes that resume from their states, and late clients."""

import shutil
import sys

import pytest

from lightning_fcl.federation.aggregation import state_tensors

from .recipes import REPLAY, strategy


class LostError(Exception):
    """A simulated crash of the server."""


@pytest.mark.seconds
@pytest.mark.parametrize(
    "answered", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)]
)
def test_server_and_nodes_killed_in_round_resume_identically(answered, rehearsal, wire, same):
    """Nodes that have already trained in the round train again, from the client state before the round."""
    one = rehearsal(REPLAY)
    simulated = one.simulate()
    number = len(one.clients)

    class Lost(wire):
        def answers(self, messages):
            training = False
            for count, answer in enumerate(super().answers(messages)):
                _, sent = self.asked[-1]
                training = sent.header["round"] == 2 and bool(sent.state)
                if training and count == answered:
                    raise LostError
                yield answer
            if training and answered == number:
                raise LostError

    with pytest.raises(LostError):
        one.serve(Lost(one.nodes()), min_clients=number)
    link = wire(one.nodes())
    deployed = one.serve(link, min_clients=number)
    assert min(parcel.header["round"] for _, parcel in link.asked) == 2
    assert same(simulated.model, deployed.model)


@pytest.mark.seconds
def test_key_keeps_its_client_after_server_restart(rehearsal, wire, caplog):
    """A node cannot claim a client that belongs to another key. Here, the restarted server requires registered keys."""
    one = rehearsal()
    one.simulate()

    class Lost(wire):
        def send(self, parcels, seconds):
            if any(parcel.header["round"] == 2 for parcel in parcels.values()):
                raise LostError
            return super().send(parcels, seconds)

    with pytest.raises(LostError):
        one.serve(Lost(one.nodes()), min_clients=3)
    link = wire([one.node("0"), one.node("2")])
    # Node 11 claims client 1 with a new key.
    link.reached[11] = one.node("1")
    one.serve(link, min_clients=1, require_registered_keys=True)
    assert (
        "Expected node 8 to be client 1, because its key belongs to this client, but the node claims to be 2."
        in caplog.text
    )
    assert "Expected node 11 to have the first key of client 1 in this run, but its key is different." in caplog.text
    assert one.rounds()[-1]["upload_bytes"].keys() == {"0"}


@pytest.mark.seconds
def test_stalled_node_does_not_stop_round_and_rejoins(rehearsal, wire):
    one = rehearsal(REPLAY)
    one.simulate()
    nodes = one.nodes()
    really = nodes[1].answer
    nodes[1].answer = lambda parcel: None if parcel.header["round"] == 1 and parcel.state else really(parcel)
    one.serve(wire(nodes), min_clients=2, round_timeout=3)
    rounds, stalled = one.rounds(), one.clients[1]
    assert [stalled in one["upload_bytes"] for one in rounds] == [True, False, True, True]
    assert "no answer within" in rounds[1]["dropped"][stalled]


@pytest.mark.seconds
def test_clients_that_join_late_or_leave_are_recorded(rehearsal, wire):
    one = rehearsal()
    one.simulate()
    first, second, third = one.nodes()

    class Changing(wire):
        def nodes(self):
            round_idx = max((parcel.header["round"] for _, parcel in self.asked), default=0)
            self.reached = {1: first, **({2: second} if round_idx < 2 else {}), **({3: third} if round_idx > 0 else {})}
            return super().nodes()

    one.serve(Changing([]), min_clients=1)
    rounds = one.rounds()
    there = [[client in one["upload_bytes"] for client in ("0", "1", "2")] for one in rounds]
    assert there[0] == [True, True, False] and there[-1] == [True, False, True]
    assert rounds[0]["dropped"] == {"2": "not connected"} and rounds[-1]["dropped"] == {"1": "not connected"}


@pytest.mark.seconds
def test_serve_too_few_clients_raises_with_missing_clients(rehearsal, wire):
    one = rehearsal()
    one.simulate()
    message = r"3 of the clients 0, 1, 2 to join within 1 s, but 0, 1 joined.* decrease `min-clients` in the run"
    message += " configuration"
    with pytest.raises(RuntimeError, match=message):
        one.serve(wire([one.node("0"), one.node("1")]), min_clients=3)
    one.serve(wire([one.node("0"), one.node("1")]), min_clients=2)
    assert one.ended()


@pytest.mark.seconds
def test_serve_after_too_few_uploads_resumes_identically(rehearsal, wire, same):
    one = rehearsal()
    simulated = one.simulate()
    nodes = one.nodes()
    really = nodes[1].answer
    nodes[1].answer = lambda parcel: None if parcel.header["round"] == 2 and parcel.state else really(parcel)
    with pytest.raises(RuntimeError, match=r"at least 3 clients in round 2, but got 2 .* then start the server again"):
        one.serve(wire(nodes), min_clients=3, round_timeout=0.5)
    link = wire(one.nodes())
    deployed = one.serve(link, min_clients=3)
    assert min(parcel.header["round"] for _, parcel in link.asked) == 2
    assert same(simulated.model, deployed.model)


BURSTS = """
import torch

from lightning_fcl.federation.accumulators import GatheringAccumulator
from lightning_fcl.federation.reductions import Reduction

sound, divisor = [100], [0]


class Bursts(Reduction):
    name = "bursts"

    def make_accumulator(self):
        return GatheringAccumulator(mean)


def mean(rows, server):
    sound[0] -= 1
    return {name: torch.stack(row).mean(dim=0) / (1 if sound[0] >= 0 else divisor[0]) for name, row in rows.items()}
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("divisor", "message"),
    [
        (0, r"finite numbers in the server state, but got non-finite numbers in .* after the aggregation of a round"),
        (
            1e-6,
            r"^Expected a round to change the server state by at most 1000 times the larger of 1 and the norm of",
        ),
    ],
)
def test_invalid_aggregate_does_not_overwrite_last_good_checkpoint(
    divisor, message, rehearsal, wire, same, tmp_path, monkeypatch
):
    """The run can resume from the last good checkpoint after the reduction is corrected."""
    (tmp_path / "bursts.py").write_text(BURSTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bursts", raising=False)
    one = rehearsal({"trainer": {"strategy": strategy(reductions={"*": {"class_path": "bursts.Bursts"}})}})
    simulated, nodes = one.simulate(), one.nodes()
    made = sys.modules["bursts"]
    made.sound[0], made.divisor[0] = 2, divisor
    with pytest.raises(ValueError, match=message):
        one.serve(wire(nodes), min_clients=3)
    simulated_to = max(value.abs().max() for value in state_tensors(simulated.model).values())
    assert all((value.abs() <= 10 * simulated_to).all() for value in one.weights().values())
    made.sound[0] = 100
    link = wire(nodes)
    deployed = one.serve(link, min_clients=3)
    assert min(parcel.header["round"] for _, parcel in link.asked) == 2
    assert same(simulated.model, deployed.model)


@pytest.mark.seconds
def test_node_rejects_round_before_its_latest_round(rehearsal, wire, caplog):
    """A node that has trained round 3 rejects round 0. A server without checkpoints starts a new federation."""
    one = rehearsal()
    one.simulate()
    nodes = one.nodes()
    one.serve(link := wire(nodes), min_clients=3)
    _, train = next((number, parcel) for number, parcel in link.asked if parcel.state)
    refused = nodes[0].answer(
        type(train)({**train.header, "outline": {**train.header["outline"], "client": "0"}}, train.state)
    )
    assert refused.header["refused"] == "other-round" and "Expected a round number of at least 3" in caplog.text
    (one.folder / "deployed").rename(one.folder / "before")
    one.serve(wire(nodes), min_clients=3)
    assert one.rounds()[-1]["correct"] == one.rounds("before")[-1]["correct"]


RARE = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_epochs": 3}}


def lost_in(wire, number):
    """Return a subclass of the link in which the server crashes when it sends the messages of round ``number``."""

    class Lost(wire):
        def send(self, parcels, seconds):
            if any(parcel.header["round"] == number for parcel in parcels.values()):
                raise LostError
            return super().send(parcels, seconds)

    return Lost


@pytest.mark.seconds
def test_serve_with_rare_checkpoints_resumes_from_last_round(rehearsal, wire, same):
    one = rehearsal({"trainer": {"callbacks": [*REPLAY["trainer"]["callbacks"], RARE]}})
    simulated = one.simulate()
    with pytest.raises(LostError):
        one.serve(lost_in(wire, 2)(one.nodes()), min_clients=3)
    link = wire(one.nodes())
    deployed = one.serve(link, min_clients=3)
    assert min(parcel.header["round"] for _, parcel in link.asked) == 2
    assert same(simulated.model, deployed.model)


@pytest.mark.seconds
def test_serve_checkpoint_older_than_record_raises(rehearsal, wire):
    one = rehearsal()
    one.simulate()
    with pytest.raises(LostError):
        one.serve(lost_in(wire, 3)(one.nodes()), min_clients=3)
    last = one.folder / "deployed" / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    for damaged in (None, whole[: len(whole) // 2]):
        last.unlink() if damaged is None else last.write_bytes(damaged)
        link = wire(one.nodes())
        with pytest.raises(RuntimeError, match=r"a checkpoint of round 2, the last .* there is none\..*Restore .*last"):
            one.serve(link, min_clients=3)
        assert link.asked == []
    # Follow the hint of the message.
    last.write_bytes(whole)
    one.serve(wire(one.nodes()), min_clients=3)
    assert len(one.rounds()) == 4


@pytest.mark.seconds
def test_serve_excludes_and_names_client_of_later_round(rehearsal, wire, caplog):
    """The server uses a copy of its earlier folder.

    Record and checkpoint match, but client 0 has trained a later round.
    """
    one = rehearsal()
    one.simulate()
    with pytest.raises(LostError):
        one.serve(lost_in(wire, 1)(one.nodes()), min_clients=3)
    shutil.copytree(one.folder / "deployed", one.folder / "copy")
    with pytest.raises(LostError):
        one.serve(lost_in(wire, 3)(one.nodes()[:1]), min_clients=1)
    (one.folder / "deployed").rename(one.folder / "newest")
    (one.folder / "copy").rename(one.folder / "deployed")
    caplog.clear()
    with pytest.raises(RuntimeError, match=r"state of 0 is from a later round\..* lack some uploads of rounds up to 1"):
        one.serve(wire(one.nodes()), min_clients=2)
    named = [one for one in caplog.records if "Round 1: problem with client 0" in one.getMessage()]
    assert named and {one.levelname for one in named} == {"WARNING"} and "`other-round`" in named[0].getMessage()
    assert [sorted(one["upload_bytes"]) for one in one.rounds()] == [
        ["0", "1", "2"],
        ["1", "2"],
        ["0", "1", "2"],
        ["0", "1", "2"],
    ]
    # Follow the hint of the message: "Restore the newest checkpoint of the run".
    shutil.rmtree(one.folder / "deployed")
    (one.folder / "newest").rename(one.folder / "deployed")
    one.serve(wire(one.nodes()[:1]), min_clients=1)
    assert one.ended()
