"""Tests of the timing simulation: deadlines and asynchronous rounds, compared with loops in plain PyTorch."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import ClientSpeeds, Deadline, FedBuff, Swarm, TopK
from lightning_fcl.callbacks import ContinualMetrics, FedProto, FedProx, FLwF2T, Replay
from lightning_fcl.cli.main import main
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError, UnknownNameError


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def methods():
    return [FLwF2T(0.3, 0.3), Replay(9, "class-balanced", "round"), FedProx(0.1)]


SPREAD = {"seconds_per_sample": 0.01, "spread": 0.8, "variation": 0.4}
OWN = {"reductions": {"model.3.bias": "local"}, "seed": 5}
ADAM = {"server_optimizer": lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-3)}


class Watch(Callback):
    """Stores the clients that trained in each round, and the record of each round."""

    def __init__(self):
        self.trained, self.rounds = [], []

    def on_client_end(self, trainer, pl_module, client_round):
        self.trained.append((client_round.round_idx, client_round.client_id))

    def on_round_end(self, trainer, pl_module):
        self.rounds.append(copy.deepcopy(trainer.strategy.server.record))


# Tests of asynchronous rounds.


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize(("participation", "buffer_size"), [(1.0, 5), (3, 3)])
def test_fedbuff_equal_clients_and_full_buffer_equals_synchronous(
    fit, make_stream, make_task, max_vectorized_clients, participation, buffer_size
):
    options = {**OWN, **ADAM, "participation": participation, "max_vectorized_clients": max_vectorized_clients}
    tasks, watches = [make_task(), make_task()], [Watch(), Watch()]
    schedules = [None, FedBuff(ClientSpeeds(0.0, latency=1.0), buffer_size)]
    for task, watch, schedule in zip(tasks, watches, schedules, strict=True):
        stream = make_stream(num_clients=5, rounds_per_experience=3)
        fit(task, stream, [*methods(), watch], synchronization=schedule, **options)
    assert equal(tasks[0].state_dict(), tasks[1].state_dict())
    assert watches[0].trained == watches[1].trained
    assert [one.simulated_seconds for one in watches[1].rounds] == [1.0] * 6
    assert [one.simulated_seconds for one in watches[0].rounds] == [None] * 6
    assert [one.download_bytes for one in watches[0].rounds] == [one.download_bytes for one in watches[1].rounds]


def fedbuff_by_hand(net, data, seconds, buffer_size, rounds, rates, exponent, mu):
    """Return the weights of FedBuff in plain PyTorch, and each round's clients, staleness above 0 and end time.

    All clients train concurrently on full batches.
    """
    local, server = rates
    weights = [p.detach().clone() for p in net.parameters()]
    under_way = {client: (time, [w.clone() for w in weights]) for client, time in seconds.items()}
    born, now, told = dict.fromkeys(seconds, 0), 0.0, []
    for round_idx in range(rounds):
        steps, buffer = [torch.zeros_like(w) for w in weights], []
        while len(buffer) < buffer_size:
            client = min(under_way, key=lambda one: under_way[one][0])
            now, start = under_way.pop(client)
            for parameter, value in zip(net.parameters(), start, strict=True):
                parameter.data.copy_(value)
            optimizer = torch.optim.SGD(net.parameters(), lr=local)
            for x, y in data[client]:
                optimizer.zero_grad()
                away = sum(((p - w) ** 2).sum() for p, w in zip(net.parameters(), start, strict=True))
                (F.cross_entropy(net(x), y) + mu / 2 * away).backward()
                optimizer.step()
            buffer.append((client, round_idx - born[client]))
            scale, share = (1 + round_idx - born[client]) ** -exponent, len(data[client][0][1])
            for step, parameter, value in zip(steps, net.parameters(), start, strict=True):
                step += share * scale * (parameter.detach() - value)
        total = sum(len(data[client][0][1]) for client, _ in buffer)
        weights = [w + server * step / total for w, step in zip(weights, steps, strict=True)]
        for client, _ in buffer:
            under_way[client], born[client] = (now + seconds[client], [w.clone() for w in weights]), round_idx + 1
        told.append((sorted(client for client, _ in buffer), {c: age for c, age in buffer if age}, now))
    return weights, told


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize(("exponent", "server_rate", "mu"), [(0.5, 1.0, 0.0), (0.0, 0.5, 0.0), (1.0, 0.5, 0.2)])
def test_fedbuff_equals_a_loop_in_plain_pytorch(
    fit, make_stream, make_task, max_vectorized_clients, exponent, server_rate, mu
):
    seconds, rounds = {"0": 1.0, "1": 2.718, "2": 4.567}, 9
    owners = np.random.default_rng(0).choice(3, 240, p=[0.5, 0.2, 0.3])
    stream = make_stream(owners, num_experiences=1, rounds_per_experience=rounds, batch_size=500)
    task, watch = make_task(), Watch()
    net = copy.deepcopy(task.model)
    fit(
        task,
        stream,
        [watch, *([FedProx(mu)] if mu else [])],
        synchronization=FedBuff(
            ClientSpeeds(0.0, per_client={c: {"latency": s} for c, s in seconds.items()}), 2, exponent
        ),
        server_optimizer=lambda params: torch.optim.SGD(params, lr=server_rate),
        local_epochs=3,
        max_vectorized_clients=max_vectorized_clients,
    )
    data = {client: [stream.get_samples(stream.plan.train[0][client])] * 3 for client in seconds}
    weights, told = fedbuff_by_hand(net, data, seconds, 2, rounds, (0.1, server_rate), exponent, mu)
    for ours, theirs in zip(task.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=1e-6, rtol=0)
    assert [(sorted(one.accepted), one.staleness) for one in watch.rounds] == [(who, age) for who, age, _ in told]
    ends = np.cumsum([one.simulated_seconds for one in watch.rounds])
    assert ends == pytest.approx([end for *_, end in told])
    assert any(one.staleness for one in watch.rounds)


@pytest.mark.seconds
@pytest.mark.parametrize(("store", "max_vectorized_clients"), [("memory", 1), ("disk", "auto")])
@pytest.mark.parametrize(
    "make",
    [lambda: FedBuff(ClientSpeeds(**SPREAD), 2), lambda: Deadline(ClientSpeeds(**SPREAD), 0.5, 3)],
    ids=["FedBuff", "Deadline"],
)
def test_resumed_timing_simulation_equals_uninterrupted(
    fit, make_stream, make_task, tmp_path, make, max_vectorized_clients, store
):
    stream = {"num_clients": 5, "rounds_per_experience": 3, "samples": 400}
    options = {
        **OWN,
        **ADAM,
        "participation": 4,
        "max_vectorized_clients": max_vectorized_clients,
        "client_store": store,
    }
    saver, saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), {"enable_checkpointing": True}
    whole, parts, stale = make_task(), [*methods(), ContinualMetrics()], 0
    fit(whole, make_stream(**stream), [*parts, saver], synchronization=make(), trainer_args=saving, **options)
    for epoch in (0, 2, 3):
        again, metrics, path = make_task(seed=99), ContinualMetrics(), tmp_path / f"epoch={epoch}.ckpt"
        trainer = fit(
            again, make_stream(**stream), [*methods(), metrics], synchronization=make(), ckpt_path=path, **options
        )
        assert equal(whole.state_dict(), again.state_dict()), epoch
        kept = ("correct", "simulated_seconds", "late_clients", "staleness", "download_bytes")
        left, right = ([{key: r[key] for key in kept} for r in m.record["rounds"]] for m in (parts[-1], metrics))
        assert left == right
        assert trainer.current_epoch == 6
        stale += len(left[-1]["staleness"]) + len(left[-1]["late_clients"])
    assert stale  # Otherwise the test would not cover stale or late uploads.


@pytest.mark.seconds
def test_second_fit_of_the_same_trainer_continues_the_clock(fit, make_stream, make_task):
    stream = {"num_clients": 5, "rounds_per_experience": 3}
    options = {**OWN, "participation": 4}
    whole, parts, watches = make_task(), make_task(), [Watch(), Watch()]
    fit(
        whole,
        make_stream(**stream),
        [*methods(), watches[0]],
        synchronization=FedBuff(ClientSpeeds(**SPREAD), 2),
        **options,
    )
    data = make_stream(**stream)
    schedule = FedBuff(ClientSpeeds(**SPREAD), 2)
    trainer = fit(parts, data, [*methods(), watches[1]], synchronization=schedule, max_epochs=2, **options)
    trainer.fit_loop.max_epochs = 6
    trainer.fit(parts, datamodule=data)
    assert equal(whole.state_dict(), parts.state_dict())
    assert watches[0].rounds == watches[1].rounds


def test_fedbuff_averages_batch_norm_statistics(fit, make_stream, make_task):
    """The server averages the statistics. Adding a stale difference could make the server's variance negative."""
    task, seen = make_task(model=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))), []

    class Sent(Watch):
        def on_client_end(self, trainer, pl_module, client_round):
            seen.append((client_round.num_samples, pl_module.state_dict()["model.1.running_var"].clone()))

        def on_round_end(self, trainer, pl_module):
            super().on_round_end(trainer, pl_module)
            total = sum(samples for samples, _ in seen)
            expected = sum(samples / total * value for samples, value in seen)
            torch.testing.assert_close(pl_module.state_dict()["model.1.running_var"], expected)
            seen.clear()

    watch = Sent()
    schedule = FedBuff(ClientSpeeds(**SPREAD), 2)
    fit(
        task,
        make_stream(num_clients=4, rounds_per_experience=4, drop_last=True),
        [watch],
        synchronization=schedule,
        seed=5,
    )
    assert any(one.staleness for one in watch.rounds)


def test_fedbuff_client_local_heads_stay_with_clients(fit, make_stream, make_task):
    task, watch, options = make_task(), Watch(), {"reductions": {"model.3.*": "local"}, "seed": 5}
    stream = make_stream(num_clients=4, rounds_per_experience=3)
    trainer = fit(task, stream, [watch], synchronization=FedBuff(ClientSpeeds(**SPREAD), 2), **options)
    first = make_task().state_dict()["model.3.weight"]
    assert torch.equal(task.state_dict()["model.3.weight"], first)
    heads = [
        trainer.strategy.server.client_store[client]["model"]["model.3.weight"] for _, client in set(watch.trained)
    ]
    assert any(one.staleness for one in watch.rounds)
    assert all(not torch.equal(head, first) for head in heads)


@pytest.mark.parametrize(
    "make", [lambda: FedBuff(ClientSpeeds(**SPREAD), 2), lambda: Deadline(ClientSpeeds(**SPREAD), 0.5)]
)
def test_last_round_of_each_client_is_evaluated(fit, make_stream, make_task, make):
    """The last round of a client is known in advance, so the model is evaluated after the client's last training."""
    watch, metrics = Watch(), ContinualMetrics(when="both")
    stream = make_stream(num_clients=5, rounds_per_experience=4)
    fit(make_task(), stream, [watch, metrics], synchronization=make(), participation=4, seed=5)
    ends = set()
    for experience in range(2):
        rounds = range(4 * experience, 4 * experience + 4)
        last = {client: round_idx for round_idx, client in watch.trained if round_idx in rounds}
        tested = [(client, entry["round"]) for entry in metrics.record["rounds"] for client in entry["local"]]
        assert {client: round_idx for client, round_idx in tested if round_idx in rounds} == last
        ends |= {*last.values()}
    # Some clients have their last training before the last round of an experience.
    assert len(ends) > 2


def test_fedbuff_with_method_that_needs_sums_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "mean"):
        fit(make_task(), make_stream(), [FedProto(0.5)], synchronization=FedBuff(ClientSpeeds(1.0), 2))


def test_reservoir_with_fedbuff_raises_and_with_deadline_trains(fit, make_series_stream, make_reservoir_task):
    """With a deadline, the sums contain only the clients whose uploads arrive in time."""
    with raises(InvalidValueError, "mean"):
        fit(make_reservoir_task(), make_series_stream(), synchronization=FedBuff(ClientSpeeds(1.0), 2))
    slow, states = ClientSpeeds(0.0, latency=1.0, per_client={"1": {"latency": 9}}), []
    for words in ({"synchronization": Deadline(slow, timeout=2)}, {"swarm": Swarm(leaves_at={"1": 0})}):
        task = make_reservoir_task()
        fit(task, make_series_stream(increments=2), **words)
        states.append(task.state_dict())
    assert equal(*states)


# Tests of deadlines.


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_deadline_late_clients_equal_absent_clients(fit, make_stream, make_task, max_vectorized_clients):
    """The states of server and clients equal the states of a federation without the late clients."""
    slow = ClientSpeeds(0.0, latency=1.0, per_client={"1": {"latency": 31}, "4": {"latency": 900}})
    gone = Swarm(leaves_at={"1": 0, "4": 0})
    stores, tasks, watches = [], [make_task(), make_task()], [Watch(), Watch()]
    for task, watch, words in zip(
        tasks, watches, ({"synchronization": Deadline(slow, 30)}, {"swarm": gone}), strict=True
    ):
        stream = make_stream(num_clients=5, rounds_per_experience=2)
        trainer = fit(
            task, stream, [*methods(), watch], max_vectorized_clients=max_vectorized_clients, **OWN, **ADAM, **words
        )
        stores.append({client: trainer.strategy.server.client_store[client] for client in stream.plan.clients})
    assert equal(tasks[0].state_dict(), tasks[1].state_dict())
    assert watches[0].trained == watches[1].trained  # Late clients do not train.
    for client in stores[0]:
        assert stores[0][client].keys() == stores[1][client].keys()
        assert all(equal(stores[0][client][part], stores[1][client][part]) for part in stores[0][client])
    assert stores[0]["1"] == {} != stores[0]["0"]
    size = sum(value.nbytes for name, value in tasks[0].state_dict().items() if name != "model.3.bias")
    for record in watches[0].rounds:
        assert (record.late_clients, record.simulated_seconds, record.staleness) == (["1", "4"], 30.0, {})
        assert record.download_bytes == dict.fromkeys("01234", size)  # Late clients download the server's state.
        assert record.upload_bytes == dict.fromkeys("023", size)


def test_simulated_time_equals_training_and_transfer_times(fit, make_stream, make_task):
    watch, stream = Watch(), make_stream(num_clients=3, samples=300)
    schedule = Deadline(ClientSpeeds(0.25, upload_bandwidth=100, download_bandwidth=1000, latency=7))
    fit(make_task(), stream, [watch], synchronization=schedule, compression=TopK(0.25), local_epochs=2, seed=5)
    for round_idx, record in enumerate(watch.rounds):
        up, down = record.upload_bytes, record.download_bytes
        samples = {client: len(rows) for client, rows in stream.plan.train[round_idx].items()}
        times = [7 + 2 * 0.25 * samples[c] + down[c] / 1000 + up[c] / 100 for c in samples]
        assert record.simulated_seconds == pytest.approx(max(times), abs=1e-8)
        assert max(up.values()) < max(down.values())


# Tests of unsupported combinations.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"synchronization": 30.0}, (InvalidTypeError, "synchronization")),
        ({"synchronization": FedBuff(ClientSpeeds(1.0), 4)}, (InvalidValueError, "buffer_size")),
        (
            {"synchronization": Deadline(ClientSpeeds(1.0, per_client={"9": {"latency": 1}}))},
            (UnknownNameError, "names"),
        ),
        ({"synchronization": Deadline(ClientSpeeds())}, (MissingValueError, "seconds_per_sample")),
    ],
)
def test_invalid_synchronization_raises(fit, make_stream, make_task, words, expected):
    with raises(*expected):
        fit(make_task(), make_stream(), **words)


def test_resume_with_other_synchronization_raises(fit, make_stream, make_task, tmp_path):
    saver, saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), {"enable_checkpointing": True}
    fit(make_task(), make_stream(), [saver], synchronization=FedBuff(ClientSpeeds(**SPREAD), 2), trainer_args=saving)
    path = tmp_path / "epoch=0.ckpt"
    for other in (None, FedBuff(ClientSpeeds(**SPREAD), 1), Deadline(ClientSpeeds(**SPREAD))):
        with raises(InvalidValueError, "synchronization", code="other-recipe"):
            fit(make_task(), make_stream(), synchronization=other, ckpt_path=path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept.pop("now"),
        lambda kept: kept["flights"][0].append(3),
        lambda kept: kept["versions"].clear(),
        lambda kept: kept.update(flights={"0": 1}),
        lambda kept: kept["versions"].update({version: {} for version in kept["versions"]}),
    ],
)
def test_resume_fedbuff_damaged_state_raises(fit, make_stream, make_task, tmp_path, damage):
    saver, saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), {"enable_checkpointing": True}
    make = lambda: FedBuff(ClientSpeeds(**SPREAD), 1)  # noqa: E731
    fit(make_task(), make_stream(), [saver], synchronization=make(), trainer_args=saving)
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    kept = next(state["asynchronous"] for state in checkpoint["callbacks"].values() if "asynchronous" in state)
    damage(kept)
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    with pytest.raises(ValueError, match=r"Expected `asynchronous` of the checkpoint|Expected the state that a client"):
        fit(make_task(), make_stream(), synchronization=make(), ckpt_path=tmp_path / "damaged.ckpt")


# Tests of recipes.

RECIPE = """
trainer:
  max_epochs: 4
  enable_progress_bar: false
  callbacks: []
  strategy:
    class_path: lightning_fcl.FederatedStrategy
    init_args: {synchronization: {class_path: lightning_fcl.FedBuff, init_args: ARGUMENTS}}
data:
  scenario: {class_path: ClassIncremental, init_args: {num_experiences: 2, rounds_per_experience: 2}}
  partition: {class_path: IID, init_args: {num_clients: 4}}
"""


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe of a small timing simulation and returns the command-line arguments."""

    def write(**changed):
        arguments = {"buffer_size": 2, "speeds": {"seconds_per_sample": 0.01, "spread": 0.8}, **changed}
        (tmp_path / "async.yaml").write_text(RECIPE.replace("ARGUMENTS", json.dumps(arguments)))
        return ["quickstart", str(tmp_path / "async.yaml")]

    return write


@pytest.mark.seconds
def test_recipe_with_fedbuff_reports_simulated_time(recipe, tmp_path, capsys):
    main(["fit", *recipe(), "--out", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rounds = results["record"]["rounds"]
    assert any(entry["staleness"] for entry in rounds) and all(entry["late_clients"] == [] for entry in rounds)
    total = sum(entry["simulated_seconds"] for entry in rounds)
    assert results["metrics"]["simulated_seconds/total"] == pytest.approx(total) and total > 0
    assert results["metrics"]["late_uploads/total"] == 0
    lines = [line.split(",") for line in (tmp_path / "out" / "metrics.csv").read_text().splitlines()]
    assert lines[0][-1] == "simulated_time"
    assert float(lines[-1][-1]) == pytest.approx(total)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"<td>{total:.1f} s</td><td>simulated duration of the run" in page
    assert "<td>0</td><td>number of late uploads in the timing simulation" in page
    assert "simulated time since the start (s)" in page
    strategy = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["trainer"]["strategy"]
    kept = strategy["init_args"]["synchronization"]
    assert kept["class_path"].endswith("FedBuff") and kept["init_args"]["staleness_exponent"] == 0.5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"buffer_size": 9}, "at most the stream's number of clients, 4"),
        ({"speeds": {"seconds_per_sampel": 1}}, "seconds_per_sampel"),
    ],
)
def test_validate_invalid_fedbuff_recipe_raises(recipe, error_of, changed, message):
    assert message in error_of(["validate", *recipe(**changed)])


def test_validate_fedbuff_recipe_succeeds(recipe, capsys):
    main(["validate", *recipe()])
    assert "The recipe is valid." in capsys.readouterr().out
