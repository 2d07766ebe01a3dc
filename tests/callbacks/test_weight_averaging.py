"""Tests of averages of the server's model over rounds."""

import copy

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream, RidgeClassifier
from lightning_fcl.callbacks import APFL, ContinualMetrics, FedProto, ICaRL, ServerWeightAveraging
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import MLP
from lightning_fcl.simulation.federation import client_model

SAVING = {"enable_checkpointing": True}
VALIDATION = Split(validation=0.2, test=0.2)


class States(Callback):
    """A callback that copies the server's model after each round."""

    def __init__(self):
        self.states = []

    def on_round_end(self, trainer, pl_module):
        self.states.append({name: value.clone() for name, value in pl_module.state_dict().items()})


def normalized(seed=0):
    """Return a classifier with batch normalization, which has floating-point buffers and an integer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    return Classifier(net, 4, lambda params: torch.optim.SGD(params, lr=0.1))


def average(values, decay):
    """Return the average of float64 arrays, computed round by round."""
    mean = values[0].double()
    for number, value in enumerate(values[1:], 1):
        weight = number / (number + 1) if decay is None else decay
        mean = weight * mean + (1 - weight) * value.double()
    return mean


def check_average(state, states, decay, copied=()):
    for name, value in state.items():
        if name in copied:
            assert torch.equal(value, states[-1][name]), name
        else:
            torch.testing.assert_close(
                value.double(), average([s[name] for s in states], decay), rtol=0, atol=1e-6, msg=name
            )


def copies(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("decay", [0.0, 0.7, None])
def test_average_equals_loop_over_server_models(fit, make_stream, decay, max_vectorized_clients):
    module, plain, seen, expected = normalized(), normalized(), States(), States()
    options = {
        "max_vectorized_clients": max_vectorized_clients,
        "server_optimizer": lambda params: torch.optim.Adam(params, lr=0.05),
        "reductions": {"model.3.bias": "local"},
        "participation": 0.7,
    }
    fit(module, make_stream(rounds_per_experience=2), [seen, ServerWeightAveraging(decay)], **options)
    fit(plain, make_stream(rounds_per_experience=2), [expected], **options)
    # The average does not change the training.
    torch.testing.assert_close(seen.states, expected.states, rtol=0, atol=0)
    copied = {"model.1.num_batches_tracked", "model.3.bias"} | (set(seen.states[0]) if decay == 0 else set())
    check_average(module.state_dict(), seen.states, decay, copied)
    assert decay == 0 or not torch.equal(module.model[0].weight, seen.states[-1]["model.0.weight"])


def test_sums_over_clients_are_copied(fit, make_stream):
    class Counts(Classifier):
        """A classifier that counts its training samples in a floating-point buffer."""

        def __init__(self):
            super().__init__(nn.Linear(6, 4), 4, torch.optim.SGD)
            self.register_buffer("samples", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            self.samples += len(batch[1])
            return super().training_step(batch, batch_idx)

    module, seen = Counts(), States()
    fit(module, make_stream(), [ServerWeightAveraging(0.7), seen], reductions={"samples": "sum"})
    assert seen.states[0]["samples"] > 0
    check_average(module.state_dict(), seen.states, 0.7, {"samples"})


def test_average_starts_in_start_round(fit, make_stream, make_task, tmp_path):
    module, seen = make_task(), States()
    callbacks = [ServerWeightAveraging(0.5, start_round=2), seen, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]
    fit(module, make_stream(rounds_per_experience=2), callbacks, trainer_args=SAVING)
    check_average(module.state_dict(), seen.states[2:], 0.5)
    saved = [torch.load(tmp_path / f"epoch={n}.ckpt", weights_only=True)["state_dict"] for n in range(4)]
    for number in range(3):
        torch.testing.assert_close(saved[number], seen.states[number], rtol=0, atol=0)
    again = make_task(seed=3)
    averaging = ServerWeightAveraging(0.5, start_round=2)
    fit(again, make_stream(rounds_per_experience=2), [averaging], ckpt_path=tmp_path / "epoch=0.ckpt")
    torch.testing.assert_close(copies(again), copies(module), rtol=0, atol=0)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("when", ["trained", "aggregated"])
def test_continual_metrics_test_the_average(fit, make_stream, is_first, when):
    """The recorded counts are those of the average, for both orders of the callbacks."""
    module, seen = normalized(), States()
    metrics = ContinualMetrics(clients="none", when=when, classes="all", evaluate_on_train=True)
    callbacks = [ServerWeightAveraging(0.8), metrics]
    stream = make_stream(rounds_per_experience=2)
    fit(module, stream, [*(callbacks if is_first else callbacks[::-1]), seen])
    plan, tested = stream.plan, metrics.record["rounds"]
    x, y = stream.get_samples(plan.test)
    for number, entry in enumerate(tested):
        if "server" not in entry["correct"]:
            assert when == "aggregated" and number % 2 == 0
            continue
        model = copy.deepcopy(module.model).eval()
        rounds = [{n.removeprefix("model."): v for n, v in state.items()} for state in seen.states[: number + 1]]
        model.load_state_dict({n: average([s[n] for s in rounds], 0.8).to(v.dtype) for n, v in rounds[-1].items()})
        correct = (model(x).argmax(1) == y).long()
        expected = torch.zeros(4, dtype=torch.long).index_add_(0, torch.from_numpy(plan.groups[plan.test]), correct)
        assert entry["correct"]["server"] == expected.tolist()
    rows = np.unique(np.concatenate([part for current in plan.train for part in current.values()]))
    x, y = stream.get_samples(rows)
    found = (module.model.eval()(x).argmax(1) == y).sum()
    assert metrics.record["training"]["correct"] == int(found)


def test_validation_uses_the_average_and_restores_the_server_model(fit, make_stream):
    validated, after = [], []

    class Own(Classifier):
        def on_validation_epoch_start(self):
            if not self.trainer.sanity_checking:
                validated.append(copies(self))

    torch.manual_seed(0)
    module, seen = Own(nn.Linear(6, 4), 4, torch.optim.SGD), States()
    look = LambdaCallback(on_train_epoch_end=lambda _, module: after.append(copies(module)))
    fit(module, make_stream(rounds_per_experience=2, split=VALIDATION), [ServerWeightAveraging(0.6), seen, look])
    assert len(validated) == 4
    for number, state in enumerate(validated):
        check_average(state, seen.states[: number + 1], 0.6)
    torch.testing.assert_close(after, seen.states, rtol=0, atol=0)


def test_validation_error_restores_the_server_model(fit, make_stream):
    class Own(Classifier):
        def validation_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 2:
                raise KeyError("stop")

    module, seen = Own(nn.Linear(6, 4), 4, torch.optim.SGD), States()
    with pytest.raises(KeyError):
        fit(module, make_stream(rounds_per_experience=2, split=VALIDATION), [ServerWeightAveraging(0.6), seen])
    torch.testing.assert_close(copies(module), seen.states[2], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_contain_the_average(fit, make_stream, tmp_path, precision, weights_only):
    module, seen = normalized(), States()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_weights_only=weights_only)
    trainer_args = {**SAVING, "precision": precision}
    fit(
        module,
        make_stream(rounds_per_experience=2),
        [saving, ServerWeightAveraging(0.7), seen],
        trainer_args=trainer_args,
    )
    for number in range(4):
        state = torch.load(tmp_path / f"epoch={number}.ckpt", weights_only=True)["state_dict"]
        for name in ("model.0.weight", "model.1.running_var"):
            expected = average([s[name].float() for s in seen.states[: number + 1]], 0.7)
            torch.testing.assert_close(state[name], expected.to(state[name].dtype))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("decay", [0.7, None])
def test_resumed_average_is_bitwise_identical(fit, make_stream, tmp_path, precision, decay):
    def train(seed, *callbacks, **options):
        module, seen = normalized(seed), States()
        trainer_args = {**SAVING, "precision": precision}
        stream = make_stream(rounds_per_experience=2, split=VALIDATION)
        fit(module, stream, [ServerWeightAveraging(decay), seen, *callbacks], trainer_args=trainer_args, **options)
        return copies(module), seen.states

    # With a monitor, the checkpoint is saved after validation. Otherwise it is saved at the end of the epoch.
    by_value = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, monitor="val/loss")
    by_epoch = ModelCheckpoint(tmp_path / "end", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    state, rounds = train(0, by_value, by_epoch)
    for folder in (tmp_path, tmp_path / "end"):
        for epoch in (0, 2, 3):
            again, later = train(9, ModelCheckpoint(tmp_path / "new"), ckpt_path=folder / f"epoch={epoch}.ckpt")
            torch.testing.assert_close(again, state, rtol=0, atol=0)
            torch.testing.assert_close(later, rounds[epoch + 1 :], rtol=0, atol=0)


def test_continued_fit_equals_one_fit(quiet, make_stream, make_task):
    def train(*rounds):
        module = make_task()
        trainer = L.Trainer(
            strategy=FederatedStrategy(), max_epochs=rounds[0], callbacks=[ServerWeightAveraging(0.7)], **quiet
        )
        stream = make_stream(rounds_per_experience=2)
        for number in rounds:
            trainer.fit_loop.max_epochs = number
            trainer.fit(module, datamodule=stream)
        return copies(module)

    torch.testing.assert_close(train(2, 4), train(4), rtol=0, atol=0)


def test_changed_module_between_fits_starts_a_new_average(quiet, make_stream, make_task):
    module, averaging, seen = make_task(), ServerWeightAveraging(0.7), States()
    callbacks = [averaging, seen]
    trainer = L.Trainer(strategy=FederatedStrategy(), max_epochs=2, callbacks=callbacks, **quiet)
    stream = make_stream(rounds_per_experience=2)
    trainer.fit(module, datamodule=stream)
    assert averaging.num_averaged == 2
    module.load_state_dict(make_task(seed=5).state_dict())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=stream)
    assert averaging.num_averaged == 2
    check_average(module.state_dict(), seen.states[2:], 0.7)


def test_resume_with_other_decay_or_without_averaging_raises(fit, make_stream, make_task, tmp_path):
    def saving():
        return [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]

    stream = make_stream()
    fit(make_task(), stream, [ServerWeightAveraging(0.7), *saving()], trainer_args=SAVING, max_epochs=1)
    path = tmp_path / "epoch=0.ckpt"
    for callbacks in ([], [ServerWeightAveraging(0.8)], [ServerWeightAveraging(0.7, start_round=1)]):
        with raises(InvalidValueError, "weight_averaging", code="other-recipe"):
            fit(make_task(), make_stream(), callbacks, ckpt_path=path)
    trainer = fit(make_task(), make_stream(), [ServerWeightAveraging(0.7)], ckpt_path=path)
    assert trainer.current_epoch == 2


class Grows(Classifier):
    """A classifier that adds a row to the head in every round except the first."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), 4, torch.optim.SGD)

    def on_train_epoch_start(self):
        if self.current_epoch:
            old, self.model = self.model, nn.Linear(6, self.model.out_features + 1)
            self.num_classes = self.model.out_features
            with torch.no_grad():
                self.model.weight[: old.out_features], self.model.bias[: old.out_features] = old.weight, old.bias
            self.optimizers().param_groups[0]["params"] = [*self.parameters()]


@pytest.fixture
def growing_stream():
    x = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
    scenario = ClassIncremental(1, rounds_per_experience=3)
    y = np.arange(48) // 2 % 4
    return FederatedStream.from_arrays(
        x, y, np.arange(48) % 2, scenario=scenario, split=Split(test=0.0), batch_size=24, seed=0
    )


@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_new_rows_of_a_growing_head_start_with_the_server_values(fit, growing_stream, max_vectorized_clients):
    module, seen = Grows(), States()
    fit(module, growing_stream, [ServerWeightAveraging(0.6), seen], max_vectorized_clients=max_vectorized_clients)
    assert module.model.weight.shape == (6, 6)
    for row in range(6):
        rounds = seen.states[max(0, row - 3) :]
        for name in ("weight", "bias"):
            expected = average([state[f"model.{name}"][row] for state in rounds], 0.6)
            torch.testing.assert_close(getattr(module.model, name)[row].double(), expected, rtol=0, atol=1e-6)


def test_growing_head_with_equal_weights_raises(fit, growing_stream):
    with raises(InvalidValueError, "decay"):
        fit(Grows(), growing_stream, [ServerWeightAveraging(None)])


def test_client_model_is_the_average_with_local_parameters(fit, make_stream):
    module, seen = normalized(), States()
    stream = make_stream(rounds_per_experience=2)
    trainer = fit(module, stream, [ServerWeightAveraging(0.7), seen], reductions={"model.3.*": "local"})
    client = stream.plan.clients[0]
    local = trainer.strategy.server.client_store[client]["model"]
    with client_model(trainer, client):
        state = copies(module)
    assert torch.equal(state["model.3.weight"], local["model.3.weight"])
    check_average({"model.0.weight": state["model.0.weight"]}, seen.states, 0.7)


def test_personal_models_of_a_method_do_not_change(fit, make_stream):
    """APFL mixes a personal model, which is not averaged, with the server's model, which is averaged."""

    def client_states(*callbacks):
        module, stream = normalized(), make_stream()
        trainer = fit(module, stream, [APFL(), *callbacks])
        store = trainer.strategy.server.client_store
        return {client: store[client] for client in stream.plan.clients}

    torch.testing.assert_close(client_states(), client_states(ServerWeightAveraging(0.5)), rtol=0, atol=0)


def test_tied_weights_are_averaged_once(fit, make_stream, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.head(self.second(self.first(x)))

    torch.manual_seed(0)
    module, seen = Classifier(Tied(), 4, torch.optim.SGD), States()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(module, make_stream(), [ServerWeightAveraging(0.7), seen, saving], trainer_args=SAVING)
    check_average(torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"], seen.states, 0.7)
    assert module.model.first.weight is module.model.second.weight
    check_average(module.state_dict(), seen.states, 0.7)


def test_decay_out_of_range_raises():
    for decay in (-0.1, 1.0, 1.5):
        with raises(InvalidValueError, "decay", value=decay):
            ServerWeightAveraging(decay)


def test_plain_trainer_raises(quiet, make_stream, make_task):
    trainer = L.Trainer(max_epochs=1, callbacks=[ServerWeightAveraging()], **quiet)
    with raises(InvalidValueError, "strategy"):
        trainer.fit(make_task(), datamodule=make_stream(num_clients=1))


@pytest.mark.parametrize("method", [FedProto(), ICaRL()], ids=lambda method: type(method).__name__)
def test_prediction_by_class_means_raises(fit, make_stream, make_task, method):
    with raises(InvalidValueError, "callbacks", value=type(method).__name__):
        fit(make_task(), make_stream(), [method, ServerWeightAveraging()])


def test_ridge_classifier_raises(fit, make_stream):
    with raises(InvalidValueError, "callbacks", value="RidgeClassifier"):
        fit(RidgeClassifier(MLP([6, 5, 4]), 4), make_stream(), [ServerWeightAveraging()])


def test_module_without_averaged_tensors_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "reductions"):
        fit(make_task(), make_stream(), [ServerWeightAveraging()], reductions={"*": "local"})


def test_two_averages_raise(fit, make_stream, make_task):
    with raises(InvalidValueError, "callbacks", value=2):
        fit(make_task(), make_stream(), [ServerWeightAveraging(0.9), ServerWeightAveraging(0.5)])
