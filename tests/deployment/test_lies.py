"""Tests that invalid answers of one client do not stop a round.

The resulting model is bitwise identical to the model that the honest clients train alone.
"""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_fcl.deployment.messages import MODEL, Parcel, RejectedMessageError
from lightning_fcl.deployment.upload_validation import MAX_INTEGER, UploadLimits
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.federation.aggregation import state_tensors

from .lies import HELLOS, KINDS, Message, more, numbers, put, read_upload, saying, server_with, without
from .recipes import strategy

TWO_ROUNDS = {"trainer": {"max_epochs": 2}}


@pytest.fixture
def prepared(rehearsal):
    one = rehearsal(TWO_ROUNDS)
    one.simulate()
    return one


@pytest.fixture
def honest(prepared, wire):
    """Return the model that clients 0 and 2 train without the malicious client 1."""
    link = wire([prepared.node("0"), prepared.node("2")])
    fit = prepared.serve(link, min_clients=2)
    (prepared.folder / "deployed").rename(prepared.folder / "honest")
    return fit.model


def lying(wire, lies):
    """Return a subclass of the link in which client 1 answers each download with invalid answers.

    ``lies`` is a function of the honest answer, of earlier honest answers, and of the download.
    """

    before = []

    class Lying(wire):
        def replies(self, number, parcel):
            answer = Message.of(self.reached[number].answer(parcel))
            if parcel.state and self.reached[number].client == "1":
                yield from (message.record() for message in lies(answer, before, parcel))
                before.append(answer)
            else:
                yield answer.record()

    return Lying


def reasons(caplog, round_idx):
    """Return the logged reasons for rejecting answers of client 1 in a round."""
    beginning = f"Round {round_idx}: problem with client 1: "
    said = [record.getMessage() for record in caplog.records]
    return [line.removeprefix(beginning) for line in said if line.startswith(beginning)]


@pytest.mark.seconds
def test_each_invalid_answer_is_logged_and_changes_nothing(prepared, honest, wire, same, caplog):
    """The invalid answers include infinite values in round 0, and the honest answer of round 0 in round 1."""

    def lies(answer, before, parcel):
        yield from (change(answer) for change, _ in KINDS.values())
        yield from before or [numbers(lambda v: v + np.inf)(answer)]

    fit = prepared.serve(lying(wire, lies)(prepared.nodes()), min_clients=2)
    assert same(honest, fit.model)
    wanted = [message for _, message in KINDS.values()]
    for round_idx, others in enumerate(([], ["The answer belongs to another message or client"])):
        for message, reason in zip(wanted + others, reasons(caplog, round_idx), strict=True):
            assert re.search(message, reason), reason
    assert "Round 0: dropped the upload of client 1 (non-finite" in caplog.text
    assert [list(one["dropped"]) for one in prepared.rounds()] == [["1"], ["1"]]
    assert len(json.dumps(read_results(prepared.folder / "deployed"))) < 10**5


@pytest.mark.seconds
def test_each_invalid_join_request_is_logged_and_changes_nothing(prepared, wire, same, caplog):
    """The malicious nodes connect after clients 0 and 1, and before client 2."""

    class Late(wire):
        def nodes(self):
            heard = {number for number, _ in self.asked}
            there, liars = super().nodes(), range(100, 100 + len(HELLOS))
            if not heard.issuperset(liars):
                del there[9]
            return there | {number: f"key {number}" for number in liars if {7, 8} <= heard}

        def replies(self, number, parcel):
            if number < 100:
                yield from super().replies(number, parcel)
            else:
                change, _ = list(HELLOS.values())[number - 100]
                yield change(Message.of(self.reached[8].answer(parcel))).record()

    fit = prepared.serve(Late(prepared.nodes()), min_clients=3, join_timeout=60)
    assert same(prepared.simulated.model, fit.model)
    said = dict(re.findall(r"Ignored node (\d+) \(client .*?\): (.*)", caplog.text))
    assert len(said) == len(HELLOS)
    for number, (_, message) in enumerate(HELLOS.values(), start=100):
        assert re.search(message, said[str(number)]), said[str(number)]


@pytest.mark.seconds
def test_repeated_answer_counts_once(prepared, wire, same):
    fit = prepared.serve(lying(wire, lambda answer, *_: [answer, answer])(prepared.nodes()), min_clients=3)
    assert same(prepared.simulated.model, fit.model)
    assert [one["dropped"]["1"] for one in prepared.rounds()] == ["a second answer, which the server ignored"] * 2


@pytest.mark.seconds
def test_valid_answer_after_invalid_answer_is_accepted(prepared, wire, same):
    lies = lying(wire, lambda answer, *_: [saying(round=9)(answer), answer])
    fit = prepared.serve(lies(prepared.nodes()), min_clients=3)
    assert same(prepared.simulated.model, fit.model)


@pytest.mark.seconds
def test_run_that_needs_all_clients_continues_without_malicious_client(prepared, honest, wire, same, caplog):
    lies = lying(wire, lambda answer, *_: [saying(samples=-3)(answer)])
    fit = prepared.serve(lies(prepared.nodes()), min_clients=3, round_timeout=2)
    assert same(honest, fit.model)
    assert [list(one["dropped"]) for one in prepared.rounds()] == [["1"], ["1"]]
    for round_idx in (0, 1):
        named = rf"at least 3 clients in round {round_idx}, but got 2 \(1: .* got -3\..*\)\. The run continues\."
        assert re.search(named, caplog.text)


@pytest.mark.seconds
def test_client_reporting_far_more_samples_is_logged(prepared, wire, caplog):
    nodes = prepared.nodes()
    really = nodes[1].answer

    def boasts(parcel):
        answer = really(parcel)
        return answer if parcel.state else Parcel({**answer.header, "samples": 10**6})

    nodes[1].answer = boasts
    prepared.serve(wire(nodes), min_clients=3)
    named = "Client {} reports 1000000 samples, more than 100 times the median of the clients"
    assert [named.format(client) in caplog.text for client in prepared.clients] == [False, True, False]


@pytest.mark.seconds
def test_max_samples_and_max_update_norm_limit_uploads(prepared, wire):
    nodes = prepared.nodes()
    prepared.serve(wire(nodes), min_clients=3)
    rounds = prepared.rounds()
    (prepared.folder / "deployed").rename(prepared.folder / "first")
    sizes = [len(np.load(prepared.folder / "data" / f"{client}.npz")["y"]) for client in prepared.clients]
    assert rounds[0]["upload_limits"] == {"max_samples": max(sizes), "max_update_norm": 1000.0}
    report = (prepared.folder / "first" / "report.html").read_text()
    assert "limit of an upload" in report and f"{max(sizes):,}" in report
    short = {"min_clients": 3, "round_timeout": 0, "join_timeout": 0.1}
    with pytest.raises(RuntimeError, match="a whole number from 0 to 5, but got"):
        prepared.serve(wire(nodes), max_samples=5, **short)
    (prepared.folder / "deployed").rename(prepared.folder / "second")
    with pytest.raises(RuntimeError, match=r"at most 0\.001 times the larger of 1 and the norm of .*, but got"):
        prepared.serve(wire(nodes), max_update_norm=0.001, **short)


ODD = [True, -1, 0, 2**31, 2**63 - 1, 1e308, "", "..", "\ud800", b"\xff", [], [1, 2], "x" * 300, float("nan")]
FORMS = [{"dtype": "torch.float16"}, {"dtype": "torch.bool"}, {"dtype": ".."}, {"shape": ()}, {"shape": (0, -1)}]


def damaged(rng, data):
    """Return bytes in which a bit is flipped, or some bytes are deleted or inserted, at random."""
    data, place = bytearray(data or b"x"), rng.randrange(len(data or b"x"))
    how, few = rng.randrange(3), rng.randrange(1, 9)
    if how == 0:
        data[place % len(data)] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[place : place + few]
    else:
        data[place:place] = rng.randbytes(few)
    return bytes(data)


def mutated(rng, message, others):
    """Return a copy of the message with one to three random changes."""
    if rng.random() < 0.3:
        message = rng.choice(list(KINDS.values()))[0](message)
    for _ in range(rng.randrange(1, 3)):
        arrays = message.arrays or more("w")(message).arrays
        name, other, word = rng.choice(list(arrays)), rng.choice(list(arrays)), rng.choice([*message.head, "more"])
        array, new = arrays[name], rng.choice(["", "..", "zz", f"{name}.x"])
        changes = (
            lambda m, word=word: saying(**{word: rng.choice(ODD)})(m),
            lambda m, word=word: without(word)(m),
            lambda m: put(**rng.choice(FORMS))(m) if m.arrays else m,
            lambda m: put(lambda data: damaged(rng, data))(m) if m.arrays else m,
            lambda m, other=other, array=array: replace(m, arrays={**m.arrays, other: array}),
            lambda m, new=new, array=array: replace(m, arrays={**m.arrays, new: array}),
            lambda m: rng.choice(others),
        )
        message = rng.choice(changes)(message)
    return message


@pytest.mark.slow
def test_random_invalid_messages_change_nothing(prepared, honest, wire, same, caplog):
    """The server rejects each changed message, unless an honest client could send the message."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng, may, sent = random.Random(seed), [], []

    def is_refused(message, parcel):
        known = {n.removeprefix(MODEL): value for n, value in parcel.state.items() if n.startswith(MODEL)}
        limits = UploadLimits(10**8, 10**3, MAX_INTEGER, 1000.0)
        try:
            upload = read_upload(message, parcel.header, "1", server_with(known), limits)
        except RejectedMessageError as error:
            assert str(error).isprintable() and len(str(error)) <= 500
            return True
        assert type(upload.samples) is int and 0 <= upload.samples <= 10**3
        assert all(known[name].shape == value.shape for name, value in upload.state.items())
        return False

    def lies(answer, before, parcel):
        while len(sent) < 1000 * (parcel.header["round"] + 1):
            message = mutated(rng, answer, before or [saying(client="0")(answer)])
            if is_refused(message, parcel):
                sent.append(message)
                yield message
            else:
                may.append(message)

    fit = prepared.serve(lying(wire, lies)(prepared.nodes()), min_clients=2)
    assert same(honest, fit.model)
    assert len(reasons(caplog, 0)) == len(reasons(caplog, 1)) == 1000
    assert all(reason.isprintable() and len(reason) <= 500 for reason in reasons(caplog, 0))
    assert len(set(reasons(caplog, 0))) > 50
    assert len(may) < len(sent) / 2


@pytest.mark.seconds
@pytest.mark.parametrize("rule", ["mean", "median", "TrimmedMean", "Krum"])
def test_robust_reductions_bound_malicious_upload(rule, rehearsal, wire):
    """The aggregate of two honest uploads and a large upload lies between the honest uploads. A mean does not."""
    where = "lightning_fcl.federation.robust"
    kinds = {"TrimmedMean": {"trim": 0.34}, "Krum": {"num_malicious_clients": 1}}
    chosen = {"class_path": f"{where}.{rule}", "init_args": kinds[rule]} if rule in kinds else rule
    one = rehearsal({"trainer": {"max_epochs": 1, "strategy": strategy(reductions={"*": chosen})}})
    one.simulate()
    honest = {}

    class Mixed(wire):
        def replies(self, number, parcel):
            answer = self.reached[number].answer(parcel)
            message = Message.of(answer)
            if parcel.state:
                honest[number] = answer.state
                message = numbers(lambda v: v * 100)(message) if number == 8 else message
            yield message.record()

    fit = one.serve(Mixed(one.nodes()), min_clients=3)
    assert one.rounds()[0]["dropped"] == {}
    low, high = (
        {name: compare(honest[7][name], honest[9][name]) for name in honest[7]} for compare in (torch.min, torch.max)
    )
    inside = [((low[n] <= value) & (value <= high[n])).all().item() for n, value in state_tensors(fit.model).items()]
    assert all(inside) is (rule != "mean")
