"""Tests of teachers: the server's model from the start of an experience, also for clients that enter late."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks import GLFC, ContinualMetrics, LwF
from lightning_fcl.data.scenarios import ClassIncremental, Delayed
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.methods.context import strip_prefix

METHODS = {"LwF": lambda: LwF(teacher="server"), "GLFC": GLFC}


class Watch(Callback):
    """Records the server's model before each round, and the teacher of each client in the round."""

    def __init__(self, method):
        self.method, self.models, self.taught = method, [], []
        begin = method.start_client

        def watched(client):
            teacher = {**client.received_state, **strip_prefix(client.method_state, "teacher")}
            names = client.module.state_dict()
            self.taught.append((client.client_round, {name: teacher[name].clone() for name in names}))
            begin(client)

        method.start_client = watched

    def on_train_epoch_start(self, trainer, module):
        if len(self.models) == trainer.current_epoch:
            self.models.append({name: value.clone() for name, value in module.state_dict().items()})


def same(left, right):
    return all(torch.equal(value, right[name]) for name, value in left.items())


def first_round(plan, experience):
    """Return the earliest round in which any client enters an experience."""
    return min(numbers.index(experience) for numbers in plan.experiences.values() if experience in numbers)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("participation", [1, 2, 1.0])
def test_teacher_is_server_model_before_experience(fit, make_stream, make_task, name, participation):
    method = METHODS[name]()
    watch, stream = Watch(method), make_stream(num_clients=4, rounds_per_experience=4)
    fit(make_task(), stream, [method, watch], participation=participation, max_vectorized_clients=1, seed=1)
    late = 0
    for part, teacher in watch.taught:
        if part.experience_idx:
            assert same(teacher, watch.models[4])
            assert part.round_idx == 4 or not same(teacher, watch.models[part.round_idx])
            late += part.round_idx > 4
    assert late


@pytest.mark.parametrize("name", METHODS)
def test_teacher_differs_between_clients_in_different_experiences(fit, make_stream, make_task, name):
    method = METHODS[name]()
    scenario = Delayed(ClassIncremental(4, rounds_per_experience=2), max_delay=2)
    watch, stream = Watch(method), make_stream(num_clients=4, scenario=scenario)
    trainer = fit(make_task(), stream, [method, watch], participation=0.5, max_vectorized_clients=1, seed=0)
    plan, server, copies = stream.plan, trainer.strategy.server, set()
    for part, teacher in watch.taught:
        of = plan.current_experiences(part.round_idx)[-1] if name == "GLFC" else part.experience_idx
        copies.add(len(plan.current_experiences(part.round_idx)))
        if of:
            assert same(teacher, watch.models[first_round(plan, of)])
    assert max(copies) > 1
    present = {name.split(".")[1] for name in server.get_section(name) if name.startswith("before.")}
    assert present == {str(number) for number in plan.current_experiences(plan.num_rounds - 1) if number}


@pytest.mark.parametrize("name", METHODS)
def test_teacher_client_local_entries_come_from_client(fit, make_stream, make_task, name):
    method = METHODS[name]()
    watch, stream = Watch(method), make_stream(num_clients=3, rounds_per_experience=3)
    fit(make_task(), stream, [method, watch], max_vectorized_clients=1, reductions={"model.3.*": "local"})
    for client in stream.plan.clients:
        teachers = [teacher for part, teacher in watch.taught if part.client_id == client and part.experience_idx]
        assert all(same(teacher, teachers[0]) for teacher in teachers[1:])
        assert same({n: v for n, v in teachers[0].items() if "model.1" in n}, watch.models[3])
        assert not torch.equal(teachers[0]["model.3.weight"], watch.models[3]["model.3.weight"])


@pytest.mark.parametrize("name", METHODS)
def test_teacher_is_sent_once_and_stored_once(fit, make_stream, make_task, name):
    records = []
    for methods in ([METHODS[name]()], []):
        metrics = ContinualMetrics()
        trainer = fit(
            make_task(),
            make_stream(num_clients=4, rounds_per_experience=4),
            [*methods, metrics],
            participation=2,
            seed=0,
        )
        records.append(metrics.record)
        if methods:
            server, size = trainer.strategy.server, sum(v.nbytes for v in make_task().state_dict().values())
    of_teacher: dict[str, list[int]] = {}
    for number, (mine, plain) in enumerate(zip(*(record["rounds"] for record in records), strict=True)):
        assert mine["upload_bytes"] == plain["upload_bytes"]
        for client, count in mine["download_bytes"].items():
            # In round 4 the model that all clients receive is the teacher.
            if number == 4:
                of_teacher[client] = [0]
            if more := count - plain["download_bytes"][client]:
                of_teacher.setdefault(client, []).append(more)
            assert not (more and number < 5)
    assert sorted(map(tuple, of_teacher.values())) == [(0,), (0,), (size,), (size,)]
    assert sum(value.nbytes for n, value in server.get_section(name).items() if n.startswith("before.")) == size
    stored = {client: server.client_store.nbytes(client) for client in server.client_store}
    # In the simulation, no client has a copy of the teacher, but each client counts the teacher's bytes.
    assert max(stored.values()) < size
    for client, count in records[0]["client_state_bytes"].items():
        assert count == stored.get(client, 0) + size * (client in of_teacher)


def test_teacher_of_stale_client_is_the_same(fit, make_stream, make_task):
    method = LwF(teacher="server")
    watch, stream = Watch(method), make_stream(num_clients=4, rounds_per_experience=4)
    schedule = FedBuff(ClientSpeeds(0.01, spread=1.5), buffer_size=2)
    trainer = fit(
        make_task(),
        stream,
        [method, watch, metrics := ContinualMetrics()],
        synchronization=schedule,
        max_vectorized_clients=1,
    )
    later = [teacher for part, teacher in watch.taught if part.experience_idx]
    assert all(same(teacher, watch.models[4]) for teacher in later) and len(later) == 8
    assert any(each["staleness"] for each in metrics.record["rounds"]) and trainer.current_epoch == 8


@pytest.mark.parametrize("name", METHODS)
def test_teacher_vectorized_equals_sequential(fit, make_stream, make_task, assert_same, name):
    results = []
    for size in (1, 2):
        task = make_task()
        stream = make_stream(num_clients=4, rounds_per_experience=3)
        fit(task, stream, [METHODS[name]()], participation=2, max_vectorized_clients=size, seed=0)
        results.append(task)
    assert_same(*results, 1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_teacher_resumed_fit_equals_uninterrupted_fit(assert_resumes, make_task, name):
    assert_resumes(make_task, METHODS[name])


def test_teacher_plain_trainer_is_model_before_fit(train, make_task, samples):
    method, task = LwF(teacher="server"), make_task()
    watch = Watch(method)
    train(task, [method], samples((0, 1)), epochs=2)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    train(task, [method], samples((2, 3)), epochs=3)
    later = [teacher for part, teacher in watch.taught if part.experience_idx == 1]
    assert len(later) == 3 and all(same(teacher, before) for teacher in later)


def test_teacher_plain_trainer_with_stream_is_model_before_experience(quiet, make_stream, make_task):
    method, stream = LwF(teacher="server"), make_stream(num_clients=1, rounds_per_experience=3)
    watch = Watch(method)
    L.Trainer(max_epochs=6, callbacks=[method, watch], **quiet).fit(make_task(), datamodule=stream)
    later = [teacher for part, teacher in watch.taught if part.experience_idx == 1]
    assert len(later) == 3 and all(same(teacher, watch.models[3]) for teacher in later)
