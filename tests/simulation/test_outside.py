"""Tests of state outside the module, such as attributes of callbacks, globals and generators.

A client's changes of this state do not affect the uploads of other clients. State that does not affect training keeps
the changes of all clients.
"""

import logging
import random
from typing import ClassVar

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy

import lightning_fcl.simulation.round as round_module
from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import FedProx
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.methods.method import Method
from lightning_fcl.models import MLP
from lightning_fcl.simulation import isolation_trial
from lightning_fcl.simulation.isolation import Isolation
from lightning_fcl.simulation.trial_steps import TrialSteps

OWNERS = np.array(["a", "b", "c"])[np.arange(96) % 3]
SEEN = []
STEPS = 0


def stream_of(clients, rounds=1):
    """Return a stream with four batches of eight samples per client. The samples do not depend on other clients."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 6)).astype(np.float32), np.arange(96) // 3 % 4
    chosen = np.isin(OWNERS, list(clients))
    scenario, split = ClassIncremental(1, rounds_per_experience=rounds), Split(test=0.0)
    words = {"scenario": scenario, "split": split, "batch_size": 8, "seed": 0}
    return FederatedStream.from_arrays(x[chosen], y[chosen], OWNERS[chosen], **words)


class Uploads(Callback):
    """Stores the state that each client uploads in each round."""

    def __init__(self):
        self.of = {}

    def on_client_end(self, trainer, pl_module, client_round):
        state = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        self.of[client_round.client_id, client_round.round_idx] = state


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.factor = 1.0
        self.prepare()

    def prepare(self):
        """Create the state of a subclass."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.model(x)
        return self.change(F.cross_entropy(output, y), output, y) * self.factor

    def change(self, loss, output, y):
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def uploads(fit):
    """Return a function that fits a module and returns the uploads by client and round."""

    def run(module, callbacks, clients, rounds=1, **kwargs):
        global STEPS
        SEEN.clear()
        STEPS, InClass.count = 0, 0
        InClass.losses.clear()
        if hasattr(in_function, "calls"):
            del in_function.calls
        with_default.__defaults__[1].clear()
        torch.manual_seed(0)
        watch, options = Uploads(), {"local_epochs": 2, "max_vectorized_clients": 1, "seed": 0, **kwargs}
        fit(module(), stream_of(clients, rounds), [*(make() for make in callbacks), watch], **options)
        return watch.of

    return run


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Tests of callbacks.


class Noise(Callback):
    """Adds noise from a NumPy generator to gradients."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            p.grad += torch.from_numpy(self.generator.normal(size=p.shape, scale=0.1)).float()


class TorchNoise(Noise):
    def __init__(self):
        self.generators = {"noise": torch.Generator().manual_seed(0)}

    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            p.grad += 0.1 * torch.randn(p.shape, generator=self.generators["noise"])


class Augments(Callback):
    """Scales batches by random numbers from a generator of Python's `random`."""

    def __init__(self):
        self.draws = random.Random(0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0].mul_(self.draws.uniform(0.5, 1.5))


class WarmUp(Callback):
    def __init__(self):
        self.steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for p in pl_module.parameters():
            p.grad.mul_(min(1.0, self.steps / 6))


class Late(Callback):
    """Zeroes gradients after ten steps.

    The trial, and a client with two local epochs, take at most ten steps, so the callback has no effect there.
    """

    def __init__(self):
        self.steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        if self.steps > 10:
            for p in pl_module.parameters():
                p.grad.zero_()


class Scales(Callback):
    """Scales the loss by a mean of earlier losses, which a user-defined object stores."""

    class Mean:
        def __init__(self):
            self.value = None

        def update(self, value):
            self.value = value if self.value is None else 0.5 * self.value + 0.5 * value

    def __init__(self):
        self.mean = self.Mean()

    def on_before_backward(self, trainer, pl_module, loss):
        self.mean.update(float(loss))
        loss.mul_(1 / (1 + self.mean.value))


class PullsBack(Callback):
    """Pulls the first layer's weights towards their moving average, which is created in the first step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        weight = pl_module.model[0].weight.data
        if not hasattr(self, "average"):
            self.average = weight.clone()
        self.average.lerp_(weight, 0.1)
        weight.lerp_(self.average, 0.3)


class Anneals(Callback):
    """Sets an attribute of the module. The attribute depends on a counter of the callback."""

    def __init__(self):
        self.state = {"count": 0}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.state["count"] += 1
        pl_module.factor = 1 / self.state["count"]


class EndsClients(Callback):
    """Changes the gradients of later clients each time a client ends."""

    def __init__(self):
        self.scale = 1.0

    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            p.grad *= self.scale * (1 if trainer.strategy.current_client_round.client_id else 0)

    def on_client_end(self, trainer, pl_module, client_round):
        self.scale *= 0.5


class Gates(Callback):
    """Scales the loss by a metric of the callback."""

    def __init__(self):
        self.mean = MeanMetric()

    def on_before_backward(self, trainer, pl_module, loss):
        self.mean.update(loss.detach())
        loss.mul_(self.mean.compute())


class Hooked(Callback):
    """Scales activations by a forward hook."""

    def on_fit_start(self, trainer, pl_module):
        self.calls = 0
        self.handle = pl_module.model[1].register_forward_hook(self.scale)

    def scale(self, layer, inputs, output):
        self.calls += 1
        return output / self.calls

    def on_fit_end(self, trainer, pl_module):
        self.handle.remove()


class Penalizes(Method):
    """A method that counts its steps but does not reset the counter in `start_client`."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def penalty(self, client, step):
        self.steps += 1
        return 0.01 * self.steps * sum(value.square().sum() for value in step.params.values())


CALLBACKS = [
    Noise,
    TorchNoise,
    Augments,
    WarmUp,
    Late,
    Scales,
    PullsBack,
    Anneals,
    EndsClients,
    Gates,
    Hooked,
    Penalizes,
]


@pytest.mark.parametrize("make", CALLBACKS)
def test_callback_state_does_not_reach_the_next_client(uploads, make):
    alone, again, after = (uploads(Base, [make], clients)["b", 0] for clients in ("b", "b", "ab"))
    assert same(alone, again) and same(alone, after)
    if make is Late:  # `Late` first acts in the 11th of 16 steps.
        alone = uploads(Base, [make], "b", local_epochs=4)["b", 0]
    plain = uploads(Base, [], "b", local_epochs=4 if make is Late else 2)["b", 0]
    assert make is EndsClients or not same(plain, alone)


def test_callback_acting_at_client_end_does_not_change_first_client(uploads):
    """Control test for `EndsClients`: the callback changes nothing before the first client ends."""
    assert same(uploads(Base, [EndsClients], "b")["b", 0], uploads(Base, [], "b")["b", 0])


@pytest.mark.parametrize("make", [Noise, WarmUp, Scales])
def test_callback_state_starts_each_client_from_the_round_start(uploads, make):
    alone, after = (uploads(Base, [make], clients, rounds=2, reductions={"*": "local"}) for clients in ("b", "ab"))
    assert same(alone["b", 0], after["b", 0]) and same(alone["b", 1], after["b", 1])
    assert not same(alone["b", 0], alone["b", 1])


# Tests of state outside the module's attributes.


class InClass(Base):
    count = 0
    losses: ClassVar[list] = []

    def change(self, loss, output, y):
        type(self).count += 1
        self.losses.append(float(loss.detach()))
        return loss * (1 + 0.1 * type(self).count + 0.1 * sum(self.losses))


class InAList(Base):
    def change(self, loss, output, y):
        SEEN.append(float(loss.detach()))
        return loss * (1 + 0.1 * sum(SEEN))


class InAGlobal(Base):
    def change(self, loss, output, y):
        global STEPS
        STEPS += 1
        return loss / STEPS


def in_function(loss):
    in_function.calls = getattr(in_function, "calls", 0) + 1
    return loss / in_function.calls


class InAFunction(Base):
    def change(self, loss, output, y):
        return in_function(loss)


def with_default(loss, weight=0.1, seen={}):  # noqa: B006
    seen["loss"] = seen.get("loss", 0.0) + float(loss.detach())
    return loss * (1 + weight * seen["loss"])


class InADefault(Base):
    def change(self, loss, output, y):
        return with_default(loss)


def in_a_closure():
    steps = 0

    class Task(Base):
        def change(self, loss, output, y):
            nonlocal steps
            steps += 1
            return loss / steps

    return Task()


class InAMetric(Base):
    def prepare(self):
        self.accuracy = MulticlassAccuracy(4)

    def change(self, loss, output, y):
        self.accuracy.update(output, y)
        self.log("accuracy", self.accuracy)
        return loss * (1 + self.accuracy.compute())


class InADictOfMetrics(Base):
    def prepare(self):
        self.measures = {"loss": MeanMetric()}

    def change(self, loss, output, y):
        self.measures["loss"].update(loss.detach())
        return loss * self.measures["loss"].compute()


class InACollection(Base):
    def prepare(self):
        self.measures = MetricCollection({"top1": MulticlassAccuracy(4), "top2": MulticlassAccuracy(4, top_k=2)})

    def change(self, loss, output, y):
        self.measures.update(output, y)
        return loss * (1 + self.measures.compute()["top2"])


MODULES = [
    InClass,
    InAList,
    InAGlobal,
    InAFunction,
    InADefault,
    in_a_closure,
    InAMetric,
    InADictOfMetrics,
    InACollection,
]


@pytest.mark.may(
    "State in class attributes, global variables or metrics that the loss reads",
    "[Reset for each client](trainer.md#state-that-is-reset-for-each-client).",
)
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("make", MODULES)
def test_state_outside_the_module_does_not_reach_the_next_client(uploads, make, max_vectorized_clients):
    alone, again, after = (
        uploads(make, [], clients, max_vectorized_clients=max_vectorized_clients)["b", 0]
        for clients in ("b", "b", "ab")
    )
    assert same(alone, again) and same(alone, after)
    assert not same(alone, uploads(Base, [], "b")["b", 0])


class DrawsInTransfer(L.LightningDataModule):
    """A data module that augments batches on the device with a NumPy generator."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def train_dataloader(self):
        rng = np.random.default_rng(0)
        x, y = torch.from_numpy(rng.normal(size=(64, 6)).astype(np.float32)), torch.arange(64) // 3 % 4
        return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return [x * self.generator.uniform(0.5, 1.5), y] if self.trainer.training else batch


def test_data_module_state_does_not_reach_the_next_client(fit):
    def upload(participation, seed):
        torch.manual_seed(0)
        stream = FederatedStream(DrawsInTransfer(), ClassIncremental(1), IID(2), Split(test=0.0), seed=0)
        watch = Uploads()
        fit(Base(), stream, [watch], max_vectorized_clients=1, seed=seed, participation=participation)
        return {client: state for (client, _), state in watch.of.items()}

    # Find a seed for which the client that is sampled alone trains second if both clients are sampled.
    alone, together = next(
        (alone, together)
        for alone, together in ((upload(1, seed), upload(1.0, seed)) for seed in range(20))
        if [*alone] != [*together][:1]
    )
    (client,) = alone
    assert same(alone[client], together[client])
    first, second = together.values()
    assert not same(first, second)


# Tests of state that training does not read.


class Watches(Noise):
    """Adds noise from a generator to gradients, and stores counts, metrics and lists of batches."""

    counts: ClassVar[dict] = {"batches": 0}

    def __init__(self):
        super().__init__()
        self.batches, self.samples, self.outputs, self.by_client = 0, MeanMetric(), [], {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        self.counts["batches"] += 1
        self.samples.update(len(batch[0]))
        self.outputs.append(outputs["loss"])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.by_client.setdefault(trainer.strategy.current_client_round.client_id, []).append(batch_idx)


class Measures(Base):
    numbers: ClassVar[list] = []

    def prepare(self):
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def change(self, loss, output, y):
        self.accuracy.update(output, y)
        self.numbers.append(len(y))
        SEEN.append(len(y))
        return loss


@pytest.mark.parametrize("watch", [Watches, None])
def test_state_that_training_does_not_read_accumulates_over_clients(fit, watch):
    SEEN.clear()
    Measures.numbers.clear()
    Watches.counts["batches"] = 0
    task, callbacks = Measures(), [watch()] if watch else []
    fit(task, stream_of("abc", rounds=2), callbacks, max_vectorized_clients=1)
    assert SEEN == Measures.numbers == [8] * 24 and task.accuracy.update_count == 24
    assert int(task.accuracy.tp + task.accuracy.fn) == 8 * 24
    for callback in callbacks:
        assert callback.batches == callback.counts["batches"] == len(callback.outputs) == len(SEEN)
        assert callback.samples.update_count == len(SEEN) and {*callback.by_client} == {*"abc"}
        assert sum(map(len, callback.by_client.values())) == len(SEEN)


@pytest.mark.may(
    "A metric that the loss reads",
    "The metric is reset for each client. After the round it contains the values of all clients.",
)
@pytest.mark.parametrize("kind", [InAMetric, InACollection, InADictOfMetrics])
def test_metric_read_by_training_has_all_values_after_round(fit, kind):
    class Task(kind):
        def prepare(self):
            super().prepare()
            self.given, self.seen = [], []

        def metric(self):
            return self.accuracy if kind is InAMetric else self.measures["loss" if kind is InADictOfMetrics else "top2"]

        def change(self, loss, output, y):
            given = (loss.detach(),) if kind is InADictOfMetrics else (output.detach(), y)
            self.given.append(given)
            return super().change(loss, output, y)

        def on_train_epoch_end(self):
            expected = self.metric().clone()
            expected.reset()
            for given in self.given:
                expected.update(*given)
            self.seen.append((float(self.metric().compute()), float(expected.compute()), len(self.given)))

    task = Task()
    fit(task, stream_of("abc", rounds=2), max_vectorized_clients=1)
    assert [number for *_, number in task.seen] == [12, 24]
    for seen, expected, _ in task.seen:
        assert seen == pytest.approx(expected, rel=1e-6)


def test_metric_read_by_training_not_mergeable_warns(fit, caplog):
    class Task(Base):
        def prepare(self):
            self.spread = PearsonCorrCoef()

        def change(self, loss, output, y):
            self.spread.update(output[:, 0].detach(), y.float())
            return loss * (1 + self.spread.compute().nan_to_num().abs())

    fit(Task(), stream_of("ab"), max_vectorized_clients=1)
    assert "The metric `spread` is reset for each client, because training reads it" in caplog.text


# Tests of the trial steps before the first round, which find the state that must be reset for each client.


class Writes(Noise):
    """Adds noise to gradients, and appends the number of each step to a file."""

    def __init__(self, path):
        super().__init__()
        self.path, self.steps = path, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        with open(self.path, "a") as file:
            file.write(f"{self.steps}\n")


class Prints(Callback):
    """Writes the number of each step to a file that is already open. The callback does not affect training."""

    def __init__(self, path):
        self.file, self.steps = path.open("w"), 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        print(self.steps, file=self.file, flush=True)


def test_callback_that_writes_files_is_not_in_the_trial(uploads, tmp_path):
    def run(clients, name):
        return uploads(Base, [lambda: Writes(tmp_path / name)], clients)["b", 0]

    assert same(run("b", "alone"), run("ab", "after"))
    assert len((tmp_path / "after").read_text().split()) == 2 * len((tmp_path / "alone").read_text().split())
    uploads(Base, [lambda: Prints(tmp_path / "prints")], "ab")
    assert (tmp_path / "prints").read_text().split() == [*map(str, range(1, 17))]


class WritesSteps(InClass):
    """A module that appends a line to a file in each step."""

    path = None

    def change(self, loss, output, y):
        with open(self.path, "a") as file:
            file.write("a step\n")
        return super().change(loss, output, y)


class Demands(InClass):
    """A module that raises an error for a batch with any number of samples other than eight."""

    path = None

    def change(self, loss, output, y):
        assert len(y) == 8
        return super().change(loss, output, y)


@pytest.mark.parametrize("make", [WritesSteps, Demands])
def test_state_is_reset_if_the_trial_is_not_possible(uploads, tmp_path, make):
    make.count, make.path = 0, tmp_path / "steps"
    alone = uploads(make, [], "b")["b", 0]
    make.count = 0
    assert same(alone, uploads(make, [], "ab")["b", 0])
    assert make is Demands or make.path.read_text().count("a step") == 8 + 16


class Traces(Measures):
    """A module that prints, logs, draws random numbers and changes state in each step."""

    def prepare(self):
        super().prepare()
        self.drawn = []

    def training_step(self, batch, batch_idx):
        print("a step")
        logging.getLogger("traces").warning("a step")
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True)
        self.logger.log_metrics({"mine": 1.0})
        return loss


class Logged(DummyLogger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append(metrics)


def test_trial_leaves_no_trace(fit, caplog, capsys, monkeypatch):
    def run():
        SEEN.clear()
        Measures.numbers.clear()
        torch.manual_seed(0)
        task, logger, watch = Traces(), Logged(), Watches()
        trainer = fit(
            task, stream_of("ab", rounds=2), [watch], max_vectorized_clients=1, seed=0, trainer_args={"logger": logger}
        )
        numbers = torch.rand(()), random.random(), np.random.rand(), trainer.global_step
        optimizer = [*trainer.optimizers[0].state]
        counts = [watch.batches, watch.samples.update_count, task.accuracy.update_count, [*SEEN], [*task.numbers]]
        traces = caplog.text.count("a step"), capsys.readouterr().out.count("a step"), len(logger.lines)
        caplog.clear()
        return task.state_dict(), task.drawn, numbers, optimizer, counts, traces

    state, *traces = run()
    monkeypatch.setattr(round_module, "isolation_of", lambda federation: Isolation("Traces"))
    without, *others = run()
    assert traces == others
    # The generator is reset for each client only if the trial runs.
    assert not same(state, without)


def test_trial_is_short(fit, monkeypatch):
    steps = []

    class Counted(TrialSteps):
        def _step(self, samples, number):
            steps.append(number)
            super()._step(samples, number)

    monkeypatch.setattr(isolation_trial, "TrialSteps", Counted)
    fit(Base(), stream_of("abc", rounds=2), max_vectorized_clients=1)
    assert steps == [0, 1, 2]
    fit(Classifier(MLP([6, 8, 4]), num_classes=4), stream_of("abc"), [FedProx(0.1)], max_vectorized_clients=1)
    assert steps == [0, 1, 2]  # There is no user code, so no trial runs.
