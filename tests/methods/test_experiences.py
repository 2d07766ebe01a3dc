"""Tests of `of_experience`: the tensors that a method resets on clients and server when an experience starts."""

import copy
import inspect
from typing import ClassVar

import pytest
import torch
from kept import entries_of, memory_of
from lightning.pytorch.callbacks import Callback
from raising import raises

from lightning_fcl import callbacks
from lightning_fcl.callbacks import GLFC, SCAFFOLD, FedDyn, LwF
from lightning_fcl.data.scenarios import ClassIncremental, Delayed
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.reductions import DeltaSum
from lightning_fcl.methods import Method

from .test_scaffold import by_hand

UNIFORM = {"client_weights": "uniform", "seed": 0}

OF_EXPERIENCE = {
    "SCAFFOLD": ("c.*", "begun.*"),
    "FedDyn": ("*",),
    "LwF": ("old", "teacher.*"),
    "ICaRL": ("old", "teacher.*"),
    "GLFC": ("teacher.*", "told"),
    "MFCL": ("teacher.*",),
}
"""Names or patterns of the state tensors that each listed method resets at the start of an experience."""


def test_of_experience_of_each_method_is_as_listed():
    kinds = [kind for name in dir(callbacks) if inspect.isclass(kind := getattr(callbacks, name))]
    found = {kind.__name__: kind.of_experience for kind in kinds if issubclass(kind, Method)}
    assert {name: patterns for name, patterns in found.items() if patterns} == OF_EXPERIENCE
    assert len(found) > 40


class Counts(Method):
    """Counts rounds on the client and on the server, for the current experience and in total."""

    reductions: ClassVar = {"*": DeltaSum()}
    of_experience: ClassVar = ("now.*",)
    names: ClassVar = ("now.rounds", "ever.rounds")

    def init_server_state(self, module):
        return {name: torch.zeros(()) for name in self.names}

    def upload_statistics(self, client, trained_state, data):
        return {name: torch.ones(()) for name in self.names}

    def update_client_state(self, client, trained_state, data):
        return {name: client.method_state.get(name, torch.zeros(())) + 1 for name in self.names}


class Alone(Counts):
    """A method that supports clients that enter the same experience in different rounds."""

    def enters_alone(self, client):
        return {"now.rounds": torch.tensor(100.0)}


def expected(stream, drawn, rounds):
    """Return the expected round counts, in the current experience and in total, of the server and of each client."""
    experiences, own, latest = stream.plan.experiences, {}, {}
    server = [0, 0]
    for number in range(rounds):
        if number and all(each[number] != each[number - 1] for each in experiences.values()):
            server[0] = 0
        for client in drawn(number):
            now, ever = own.get(client, (0, 0))
            if latest.get(client) != experiences[client][number]:
                now = 0
            own[client], latest[client] = (now + 1, ever + 1), experiences[client][number]
            server = [server[0] + 1, server[1] + 1]
    return tuple(server), own


def counted(trainer, kind="Counts"):
    server, names = trainer.strategy.server, Counts.names
    states = {client: server.client_store.get_section(client, kind) for client in server.client_store}
    own = {client: tuple(int(memory[name]) for name in names) for client, memory in states.items()}
    return tuple(int(server.get_section(kind)[name]) for name in names), own


@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
@pytest.mark.parametrize("participation", [1.0, 2])
def test_of_experience_counts_equal_plain_python_counts(
    fit, make_stream, make_task, participation, max_vectorized_clients
):
    stream = make_stream(num_clients=4, rounds_per_experience=3)
    trainer = fit(
        make_task(),
        stream,
        [Counts()],
        participation=participation,
        max_vectorized_clients=max_vectorized_clients,
        seed=0,
    )
    drawn = trainer.strategy.federation.participation.expected_clients
    server, own = expected(stream, lambda number: drawn(stream.plan, number), stream.plan.num_rounds)
    assert counted(trainer) == (server, own)
    assert server[0] < server[1]


def test_of_experience_with_one_experience_resets_nothing(fit, make_stream, make_task):
    server, own = counted(fit(make_task(), make_stream(num_experiences=1, rounds_per_experience=3), [Counts()]))
    assert server == (9, 9) and {*own.values()} == {(3, 3)}


@pytest.mark.parametrize("method", [Counts, SCAFFOLD, lambda: FedDyn(0.2)])
def test_resumed_fit_resets_same_experience_state(assert_resumes, make_task, method):
    assert_resumes(make_task, method, client_weights="uniform")


class CountsRounds(Method):
    """A method that counts the rounds of a client in an experience, and keeps nothing when the experience ends."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def update_client_state(self, client, trained_state, data):
        rounds = client.method_state.get("rounds", torch.zeros(())) + 1
        self.counts.append((client.client_round.client_id, client.client_round.round_idx, int(rounds)))
        return {"rounds": rounds}

    def end_experience(self, client, trained_state, data):
        return {}


@pytest.mark.parametrize("client_store", ["memory", "disk"])
@pytest.mark.parametrize("participation", [1.0, 2])
def test_end_experience_empty_result_keeps_state_within_experience(
    fit, make_stream, make_task, client_store, participation
):
    method = CountsRounds()
    fit(make_task(), make_stream(rounds_per_experience=3), [method], participation=participation, seed=0,
        client_store=client_store)  # fmt: skip
    expected, rounds = [], {}
    for client, round_idx, _ in method.counts:
        rounds[client, round_idx // 3] = rounds.get((client, round_idx // 3), 0) + 1
        expected.append((client, round_idx, rounds[client, round_idx // 3]))
    assert method.counts == expected and max(rounds.values()) > 1


def test_plain_trainer_fit_is_one_experience(train, make_task, samples):
    method, task = Counts(), make_task()
    for fits in (1, 2):
        train(task, [method], samples(), epochs=3)
        for kept in (memory_of(method), entries_of(method)):
            assert [int(kept[name]) for name in Counts.names] == [3, 3 * fits]


class Variates(Callback):
    """Records the names of the server's variates that SCAFFOLD's clients store in their method state."""

    def __init__(self):
        self.begun = set()

    def on_round_end(self, trainer, module):
        for client in trainer.strategy.server.client_store:
            memory = trainer.strategy.server.client_store.get_section(client, "SCAFFOLD")
            self.begun |= {name for name in memory if name.startswith("begun.")}


def staggered(make_stream, delay):
    return make_stream(num_clients=4, scenario=Delayed(ClassIncremental(2, rounds_per_experience=3), max_delay=delay))


def test_delayed_clients_are_supported_or_raise(fit, make_stream, make_task):
    stream, watch = staggered(make_stream, 3), Variates()
    stream.setup("fit")
    assert not stream.plan.in_step
    for method in (FedDyn(0.2), Counts()):
        with raises(InvalidValueError, "scenario"):
            fit(make_task(), stream, [method], **UNIFORM)
    # With alpha 0, FedDyn has no server state.
    fit(make_task(), stream, [FedDyn(0.0)], **UNIFORM)
    fit(make_task(), stream, [SCAFFOLD(), watch], **UNIFORM)
    assert watch.begun
    for delay in (3, 0):
        stream = staggered(make_stream, delay)
        trainer = fit(make_task(), stream, [Alone()], seed=0)
        server, own = expected(stream, stream.plan.train.__getitem__, stream.plan.num_rounds)
        assert (server[0] == server[1]) == (delay > 0)
        more = 100 if delay else 0
        assert counted(trainer, "Alone") == (
            server,
            {client: (now + more, total) for client, (now, total) in own.items()},
        )


@pytest.mark.parametrize("experiences", [1, 4])
def test_scaffold_partial_participation_equals_algorithm_per_experience(
    fit, make_stream, make_task, assert_same, experiences
):
    task = make_task()
    stream = make_stream(
        partition="dirichlet", num_clients=4, num_experiences=experiences, rounds_per_experience=3, shuffle=False
    )
    hand, watch = copy.deepcopy(task), Variates()
    trainer = fit(
        task, stream, [SCAFFOLD(), watch], participation=2, max_vectorized_clients=1, local_epochs=2, **UNIFORM
    )
    participation = trainer.strategy.federation.participation

    def with_samples(number):
        return [
            client
            for client in participation.expected_clients(stream.plan, number)
            if client in stream.plan.train[number]
        ]

    by_hand(hand, stream, with_samples)
    assert_same(task, hand, 1e-5)
    # Clients store no copies of the server's variates.
    assert not watch.begun


def test_distillation_methods_support_delayed_clients(fit, make_stream, make_task):
    for method in (LwF(teacher="server"), LwF(), GLFC()):
        fit(make_task(), staggered(make_stream, 3), [method])
