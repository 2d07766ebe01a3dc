"""Tests of nodes that join, leave, stall, reconnect or claim another client. The tests control the clock."""

import logging
from itertools import count, pairwise

import pytest

from lightning_fcl import __version__
from lightning_fcl.deployment.messages import Parcel, to_record, unpack
from lightning_fcl.deployment.node_registry import JOIN_INTERVAL_S, RETRY_INTERVAL_S, NodeRegistry

HELLO = {"kind": "hello"}
CLIENTS = ["a", "b", "c"]


def record(head):
    return to_record(Parcel(head))


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self):
        self.now = 100.0
        # Functions that run once. The key of a function is the number of seconds from the start until the call.
        self.later = {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for when in [when for when in self.later if self.now - 100 > when]:
            self.later.pop(when)()


class Air:
    """A link to nodes. A node is a function that takes a message and the time, and returns an answer or None."""

    def __init__(self, clock):
        self.clock, self.numbers, self.there, self.sent, self.log = clock, count(), {}, {}, []
        # By node number: the public key of the node, and the number of seconds until its answers arrive.
        self.keys, self.takes = {}, {}
        self.answers_of_the_gone = "it is gone"

    def nodes(self):
        return {number: self.keys.get(number, f"key {number}") for number in self.there}

    def send(self, parcels, seconds):
        new = {f"m{next(self.numbers)}": node for node in parcels if node in self.there}
        self.sent |= {message: (node, parcels[node], self.clock.now) for message, node in new.items()}
        self.log += [(self.clock.now - 100, node, parcels[node].header["kind"]) for node in new.values()]
        return new

    def answers(self, messages):
        for message in list(messages):
            node, parcel, since = self.sent[message]
            if self.clock.now - since < self.takes.get(node, 0):
                continue
            answer = self.there[node](parcel, self.clock.now - 100) if node in self.there else self.answers_of_the_gone
            if answer is not None:
                yield message, answer

    def asked(self, node, kind="hello"):
        """Return the times when the node got a message of the given kind."""
        return [when for when, number, what in self.log if (number, what) == (node, kind)]


def client(name):
    """Return a node of a client that always answers."""
    head = {"client": name, "version": __version__, "recipe": "r", "held": "", "samples": 9}
    return lambda parcel, now: record(head)


def changing(*parts):
    """Return a node whose behavior changes over time.

    Each part is a start time and the node whose behavior starts then.
    """
    return lambda parcel, now: next(node for since, node in reversed(parts) if now >= since)(parcel, now)


def silent(parcel, now):
    """A node that never answers."""


def stalling(name):
    """Return a node of a client that answers only `hello` messages."""
    return lambda parcel, now: client(name)(parcel, now) if parcel.header["kind"] == "hello" else None


def refusing(parcel, now):
    """A node that answers with the error that its data are unusable."""
    return record({"client": "a", "version": __version__, "recipe": "r", "refused": "unusable-data", "argument": ""})


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr("lightning_fcl.deployment.node_registry.time", one)
    return one


@pytest.fixture
def air(clock):
    return Air(clock)


@pytest.fixture
def members(air):
    one = NodeRegistry(air, "r", 20, 100, {})
    one.start_round(HELLO, "", CLIENTS)
    return one


@pytest.fixture
def gather(air, members):
    """Return a function that waits up to 20 s for answers of clients, and up to 100 s more if too few clients answer.

    The attribute `taken` of the function lists the client of each answer.
    """

    def run(wanted, needed, counts=lambda answer: True):
        run.taken = []

        def take(name, answer, head):
            assert head == {"kind": "train", "for": name}
            run.taken.append(name)
            return counts(answer)

        sent_to = lambda name, node: Parcel({"kind": "train", "for": name})  # noqa: E731
        run.left = members.collect_answers(wanted, needed, sent_to, take)
        run.has_enough_answers = members.has_enough_answers
        return members.num_accepted_answers

    return run


def test_second_node_for_client_is_admitted_after_first_is_gone(air, members, caplog):
    air.there = {7: client("a")}
    assert members.wait_for_nodes(["a"], 1) == {"a": 7} and members.duplicate_claims == {}
    air.there[8] = client("a")
    for _ in range(20):
        assert members.wait_for_nodes(["a"], 1) == {"a": 7}
        air.clock.sleep(1)
    assert members.duplicate_claims == {"a": ["7", "8"]}
    assert "got two for a: node 7 is admitted, and node 8 also claims to be a" in caplog.text
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1
    del air.there[7]
    since = air.clock.now
    assert members.wait_for_nodes(["a"], 1) == {"a": 8} and air.clock.now - since <= RETRY_INTERVAL_S + 1
    assert members.duplicate_claims == {}


def test_key_keeps_its_client_on_other_nodes(air, members, caplog):
    air.there, air.keys = {7: client("a")}, {7: "mine", 8: "mine"}
    assert members.wait_for_nodes(["a", "b"], 1) == {"a": 7}
    air.there = {8: client("b"), 9: client("b")}
    assert members.wait_for_nodes(["a", "b"], 1) == {"b": 9}
    assert (
        "Ignored node 8 (client b): Expected node 8 to be client a, because its key belongs to this client, but the "
        "node claims to be b." in caplog.text
    )
    air.there = {8: client("a")}
    assert members.wait_for_nodes(["a", "b"], 1) == {"a": 8}


def test_registered_keys_client_keeps_its_first_key(air, caplog):
    """A new key cannot claim the client, even if the node with the first key is away, or if the run is resumed."""
    claimed = {}
    air.there, air.keys = {7: client("a")}, {7: "mine", 8: "other", 9: "mine"}
    for registered in (True, False):
        one = NodeRegistry(air, "r", 20, 4, claimed, registered)
        one.start_round(HELLO, "", CLIENTS)
        if registered:
            assert one.wait_for_nodes(["a"], 1) == {"a": 7} and claimed == {"mine": "a"}
            air.there = {8: client("a")}
            with pytest.raises(RuntimeError, match="Expected node 8 to have the first key of client a in this run"):
                one.wait_for_nodes(["a"], 1)
            air.there = {8: client("a"), 9: client("a")}
            assert one.wait_for_nodes(["a"], 1) == {"a": 9} and claimed == {"mine": "a"}
            air.there = {8: client("a")}
    assert one.wait_for_nodes(["a"], 1) == {"a": 8}


def test_node_without_data_is_asked_until_data_exists(air, members, caplog):
    air.there = {7: changing((0, refusing), (20, client("a")))}
    assert members.wait_for_nodes(["a"], 1) == {"a": 7}
    times = air.asked(7)
    assert times[0] == 0 and 20 <= times[-1] <= 20 + RETRY_INTERVAL_S + 1
    assert all(RETRY_INTERVAL_S <= later - one <= RETRY_INTERVAL_S + 1 for one, later in pairwise(times))
    error = "Expected an answer of client a, but got the error `unusable-data`."
    assert caplog.text.count(f"Ignored node 7 (client a): {error}") == 1


def test_collect_answers_waits_once_for_silent_node_until_timeout(air, gather, caplog):
    """The silent node gets a new number before each of three rounds, like a SuperNode without a registered key.

    Each of these rounds waits for the node. In the later rounds, the node keeps its number.
    """
    air.there = {7: client("a"), 8: silent}
    assert gather(["a", "b"], 1) == 1 and gather.left == {"b": "not connected"}
    assert 20 < air.clock.now - 100 < 21
    for number in range(9, 12):
        del air.there[number - 1]
        air.there[number] = silent
        since = air.clock.now
        assert gather(["a", "b"], 1) == 1 and 20 < air.clock.now - since < 21
    air.clock.sleep(JOIN_INTERVAL_S)
    # After `JOIN_INTERVAL_S`, rounds no longer wait for the node.
    for _ in range(3):
        since = air.clock.now
        assert gather(["a", "b"], 1) == 1 and air.clock.now - since < 1
    assert "start `lightning-fcl deploy executor` for it" in caplog.text


def test_collect_answers_sends_round_to_node_that_joins_late(air, gather):
    air.there = {7: client("a"), 8: changing((0, silent), (10, client("b")))}
    assert gather(["a", "b"], 1) == 2 and gather.left == {} and gather.taken == ["a", "b"]
    assert 10 <= air.clock.now - 100 < 11


def test_wait_for_nodes_admits_node_slower_than_join_interval(air, members, caplog):
    air.there, air.takes = {7: client("a")}, {7: JOIN_INTERVAL_S + 20}
    assert members.wait_for_nodes(["a"], 1) == {"a": 7}
    assert JOIN_INTERVAL_S + 20 <= air.clock.now - 100 < JOIN_INTERVAL_S + 25
    assert len(air.asked(7)) == 2 and "Ignored node 7 (client unknown): Expected an answer from node 7" in caplog.text


def test_collect_answers_ignores_nodes_connected_after_round_start(air, gather):
    air.there = {7: changing((0, stalling("a")), (5, client("a")))}
    air.clock.later = {2: lambda: air.there.update({8: silent, 9: stalling("c")})}
    assert gather(["a", "b", "c"], 1) == 1 and 5 <= air.clock.now - 100 < 6
    assert air.asked(9, "train") == []


def test_wait_for_nodes_lists_unexpected_clients_with_setting(air, members, caplog):
    air.there = {number: client(f"plant-{name}") for number, name in enumerate("abc", start=7)}
    air.there[10] = refusing
    with pytest.raises(RuntimeError) as ended:
        members.wait_for_nodes(["a", "b"], 1)
    assert 100 < air.clock.now - 100 < 101
    setting = 'set `data` and clients="plant-a,plant-b,plant-c" in the run configuration'
    waiting = [one for one in caplog.records if one.getMessage().startswith("Waiting for 1 more of the clients")]
    # The warnings come after 3 s and 63 s.
    assert {one.levelno for one in waiting} == {logging.WARNING} and len(waiting) == 2
    for text in [one.getMessage() for one in waiting] + [str(ended.value)]:
        assert setting in text and "Ignored 4 connected nodes." in text and "`unusable-data`" in text
        assert "Expected node 8 to be one of the clients a, b, c of the run, but it is plant-b." in text
    ignored = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Ignored node")]
    assert [line.split(":")[0] for line in ignored] == [
        *(f"Ignored node {number} (client plant-{name})" for number, name in ((7, "a"), (8, "b"), (9, "c"))),
        "Ignored node 10 (client a)",
    ]
    air.there = {8: client("b")}
    air.clock.sleep(RETRY_INTERVAL_S)
    assert members.wait_for_nodes(["a", "b"], 1) == {"b": 8}


def test_collect_answers_warns_once_a_minute_about_missing_clients(air, gather, caplog):
    air.there = {7: client("a"), 8: stalling("b")}
    gather(["a", "b"], 2)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert said == [
        "Waiting for answers of these clients: b. Accepted answers: 1. Required answers: 2."
    ]  # The only warning comes after 60 s of 120 s.


def test_wait_for_nodes_too_few_clients_raises_with_reasons(air, members, caplog):
    air.there = {7: refusing, 8: client("b")}
    with pytest.raises(
        RuntimeError, match=r"at least 2 of the clients a, b to join within 100 s, but b joined\..*`unusable-data`"
    ):
        members.wait_for_nodes(["a", "b"], 2)
    assert "Waiting for 1 more of the clients a to join. Ignored 1 connected node. Expected an answer" in caplog.text
    assert 100 < air.clock.now - 100 < 101


def test_start_round_changed_state_digest_asks_all_nodes_again(air, members):
    air.there = {7: client("a")}
    members.wait_for_nodes(["a"], 1)
    members.start_round(HELLO, "other", CLIENTS)
    assert members.wait_for_nodes(["a"], 1) == {"a": 7} and len(air.asked(7)) == 2 and members.compatible_nodes == set()


def test_lost_client_on_another_node_gets_round_again(air, gather):
    """The new node connects before Flower reports that the old node is gone."""
    air.there = {7: stalling("a"), 8: client("b")}
    air.clock.later = {2: lambda: air.there.update({9: client("a")}), 40: lambda: air.there.pop(7)}
    assert gather(["a", "b"], 2) == 2 and gather.left == {}
    assert gather.taken == ["b", "a"]
    assert len(air.asked(7, "train")) == 2 and len(air.asked(9, "train")) == 1
    assert 40 < air.asked(9, "train")[0] < 40 + 2 * RETRY_INTERVAL_S + 1


def lost_in_training(name, until):
    """Return a node whose client process crashes in training before a given time, and works afterwards."""

    def node(parcel, now):
        if parcel.header["kind"] == "train" and now < until:
            return "it has crashed"
        return client(name)(parcel, now)

    return node


def test_lost_answer_resends_round_after_round_timeout(air, gather):
    """Flower loses an answer of a SuperNode if the SuperNode's previous answer belonged to a finished run."""
    sent = []

    def loses_the_first(parcel, now):
        if parcel.header["kind"] == "train" and parcel not in sent:
            sent.append(parcel)
        return None if sent and parcel is sent[0] else client("a")(parcel, now)

    air.there = {7: loses_the_first, 8: client("b")}
    assert gather(["a", "b"], 2) == 2 and gather.left == {} and gather.taken == ["b", "a"]
    assert 20 < air.clock.now - 100 < 20 + RETRY_INTERVAL_S + 1


def test_slow_node_gets_round_again_after_longer_pauses(air, gather):
    """A node processes its messages in sequence, so frequent messages would make the node slower."""
    air.there = {7: stalling("a"), 8: client("b")}
    assert gather(["a", "b"], 2) == 1 and gather.left == {"a": "no answer within 20 s"}
    pauses = [later - one for one, later in pairwise(air.asked(7, "train"))]
    assert (
        len(pauses) == 2 and 20 < pauses[0] < 20 + 2 * RETRY_INTERVAL_S and 40 < pauses[1] < 40 + 2 * RETRY_INTERVAL_S
    )


def test_crashed_client_process_gets_round_again_on_same_node(air, gather):
    air.there = {7: lost_in_training("a", 10), 8: client("b")}
    assert gather(["a", "b"], 2) == 2 and gather.taken == ["b", "a"]
    times = air.asked(7, "train")
    assert len(times) > 1 and min(b - a for a, b in pairwise(times)) >= RETRY_INTERVAL_S


def test_round_with_enough_answers_ends_without_lost_or_slow_clients(air, gather):
    air.there = {7: lost_in_training("a", 1000), 8: client("b")}
    assert gather(["a", "b", "c"], 1) == 1 and air.clock.now - 100 < 1
    assert gather.left == {"a": "it has crashed", "c": "not connected"}
    air.there[7] = stalling("a")
    assert gather(["a", "b"], 1) == 1 and 20 < air.clock.now - 100 < 22
    assert gather.left == {"a": "no answer within 20 s"} and gather.taken == ["b"]


def test_round_with_too_few_answers_ends_after_both_timeouts(air, gather):
    air.there = {7: lost_in_training("a", 1000), 8: client("b")}
    assert gather(["a", "b"], 2) == 1 and 120 < air.clock.now - 100 < 121
    assert gather.left == {"a": "it has crashed"}


def test_late_client_replaces_stalled_client(air, gather):
    air.there = {7: stalling("a"), 8: client("b")}
    air.clock.later = {5: lambda: air.there.update({9: client("c")})}
    assert gather(["a", "b", "c"], 2) == 2 and gather.left == {"a": "no answer within 20 s"}
    assert 20 < air.clock.now - 100 < 20 + 2 * RETRY_INTERVAL_S + 1


def liar_until(since, clock):
    """Return a function that rejects answers of client `a` before a given time and accepts all other answers."""
    return lambda answer: unpack(answer).header["client"] != "a" or clock.now - 100 >= since


def test_round_that_needs_all_ends_without_rejected_client(air, gather):
    """Until the round ends, the rejected client gets the message again after increasing pauses."""
    air.there = {7: client("a"), 8: client("b")}
    assert gather(["a", "b"], 2, liar_until(1000, air.clock)) == 1 and 20 < air.clock.now - 100 < 21
    assert gather.has_enough_answers and gather.left == {} and gather.taken.count("b") == 1
    pauses = [later - one for one, later in pairwise(air.asked(7, "train"))]
    assert len(pauses) == 2 and RETRY_INTERVAL_S <= pauses[0] < pauses[1]


def test_later_valid_answer_of_client_is_accepted(air, gather):
    air.there = {7: client("a"), 8: client("b")}
    assert gather(["a", "b"], 2, liar_until(2, air.clock)) == 2 and air.clock.now - 100 < 2 + 2 * RETRY_INTERVAL_S + 1


def test_round_waits_for_missing_client_despite_rejected_client(air, gather):
    """While client `c` can still answer, the round waits, and the required number of answers stays the same."""
    air.there = {7: client("a"), 8: client("b"), 9: changing((0, stalling("c")), (50, client("c")))}
    assert gather(["a", "b", "c"], 3, liar_until(1000, air.clock)) == 2 and 50 <= air.clock.now - 100 < 51
    assert gather.has_enough_answers
    air.there[9] = stalling("c")
    since = air.clock.now
    assert gather(["a", "b", "c"], 2, liar_until(1000, air.clock)) == 1 and 120 < air.clock.now - since < 121
    assert not gather.has_enough_answers and gather.left == {"c": "no answer within 20 s"}


def test_round_without_valid_answers_asks_again_until_timeout(air, gather):
    """A temporary error of all clients, such as a full disk, does not end the run immediately."""
    air.there = {7: client("a")}
    assert gather(["a"], 1, liar_until(50, air.clock)) == 1 and 50 <= air.clock.now - 100 < 120
    since = air.clock.now
    assert gather(["a"], 1, liar_until(1000, air.clock)) == 0 and 120 < air.clock.now - since < 121
    assert not gather.has_enough_answers


def test_answer_of_disconnected_node_is_not_awaited(air, gather):
    """The client gets the message again when it connects with a new node."""
    air.there = {7: stalling("a"), 8: client("b")}
    # Flower does not report that the node is gone.
    air.answers_of_the_gone = None

    def comes_back():
        del air.there[7]
        air.there[9] = client("a")

    air.clock.later = {4: comes_back}
    assert gather(["a", "b"], 2) == 2 and gather.left == {} and gather.taken == ["b", "a"]
    assert air.clock.now - 100 < 4 + 2 * RETRY_INTERVAL_S + 1
