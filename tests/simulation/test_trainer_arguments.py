"""Tests of arguments of Lightning's Trainer in a federation: they apply to a client or a round, or raise an error."""

import sys
from types import ModuleType

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import DoublePrecision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.connectors import callback_connector
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import MLP

COHORTS = pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])


class Counts(L.Callback):
    """Stores the rounds that were followed by a validation, and counts the batches of each stage."""

    def __init__(self):
        self.rounds, self.batches = [], {"sanity": 0, "validate": 0, "test": 0, "predict": 0}

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.rounds.append(trainer.current_epoch)

    def on_validation_batch_end(self, trainer, *_):
        self.batches["sanity" if trainer.sanity_checking else "validate"] += 1

    def on_test_batch_end(self, *_):
        self.batches["test"] += 1

    def on_predict_batch_end(self, *_):
        self.batches["predict"] += 1


@pytest.fixture
def digits():
    """Return a stream of three rounds with several batches of validation and test samples."""
    return FederatedStream("digits", ClassIncremental(1, 3), IID(2), Split(0.4, 0.4), batch_size=64, seed=0)


@pytest.fixture
def task():
    torch.manual_seed(0)
    return Classifier(MLP([64, 16, 10]), 10, lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.argument("accelerator", "Supported. Clients train on this device, and the server's state is stored on it.")
def test_accelerator_trains_clients(fit, make_stream, make_task, assert_same):
    devices = []

    class Own(CPUAccelerator):
        def setup_device(self, device):
            devices.append(device)

    task, same = make_task(), make_task()
    trainer = fit(task, make_stream(), trainer_args={"accelerator": Own()})
    fit(same, make_stream())
    assert isinstance(trainer.accelerator, Own) and devices == [trainer.strategy.root_device]
    assert_same(task, same, 0)


@pytest.mark.argument(
    "precision", "Supported for each client's training. Clients train sequentially unless the precision is `32-true`."
)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precision_applies_to_clients(fit, make_stream, make_task, assert_same, precision):
    federated, plain, full = make_task(), make_task(), make_task()
    arguments = {"trainer_args": {"precision": precision}}
    trainer = fit(federated, make_stream(num_clients=1), **arguments)
    fit(plain, make_stream(num_clients=1), strategy="auto", max_epochs=2, **arguments)
    fit(full, make_stream(num_clients=1))
    assert_same(federated, plain, 1e-9)
    assert not all(map(torch.equal, federated.double().parameters(), full.double().parameters()))
    assert trainer.strategy.federation.local_trainer.num_vectorized_clients == 1


@pytest.mark.argument("min_epochs", "Supported. Minimum number of rounds before early stopping can end the fit.")
def test_min_epochs_is_minimum_number_of_rounds(fit, make_stream, make_task, assert_same):
    task, three = make_task(), make_task()
    stop = LambdaCallback(on_train_epoch_end=lambda trainer, _: setattr(trainer, "should_stop", True))
    stopped = fit(make_task(), make_stream(rounds_per_experience=2), [stop])
    trainer = fit(task, make_stream(rounds_per_experience=2), [stop], trainer_args={"min_epochs": 3})
    fit(three, make_stream(rounds_per_experience=2), max_epochs=3)
    assert (stopped.current_epoch, trainer.current_epoch) == (1, 3)
    assert_same(task, three, 0)


@pytest.mark.argument("max_steps", "Not supported. The fit would end within a round. Use `max_epochs`, in rounds.")
@pytest.mark.argument(
    "min_steps",
    "Not supported. The number of steps of a round depends on the number of vectorized clients. Use `min_epochs`.",
)
@pytest.mark.argument(
    "val_check_interval",
    "Not supported, except 1.0. There is no server state within a round. Use `check_val_every_n_epoch`.",
)
@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"max_steps": 5}, "max_steps"),
        ({"min_steps": 5}, "min_steps"),
        ({"val_check_interval": 1}, "val_check_interval"),
        ({"val_check_interval": 0.5}, "val_check_interval"),
        ({"val_check_interval": "00:00:00:01"}, "val_check_interval"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 2}, "check_val_every_n_epoch"),
        ({"check_val_every_n_epoch": None}, "check_val_every_n_epoch"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches"),
    ],
)  # fmt: skip
def test_unsupported_trainer_arguments_raise(fit, make_stream, make_task, arguments, argument):
    with raises(InvalidValueError, argument):
        fit(make_task(), make_stream(), trainer_args=arguments)


@pytest.mark.argument(
    "limit_val_batches", "Supported. Number of validation batches. Validation uses the server's model."
)
@pytest.mark.argument("limit_test_batches", "Supported. Number of test batches. Tests use the server's model.")
@pytest.mark.argument(
    "limit_predict_batches", "Supported. Number of batches to predict. Predictions use the server's model."
)
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_limits_apply_to_batches(fit, task, digits, stage):
    limit, counts = "limit_val_batches" if stage == "validate" else f"limit_{stage}_batches", Counts()
    trainer = fit(task, digits, [counts], trainer_args={limit: 1, "num_sanity_val_steps": 0})
    loaders = {"validate": digits.val_dataloader, "test": digits.test_dataloader, "predict": digits.predict_dataloader}
    expected = {name: len(loader()) for name, loader in loaders.items()}
    # The fit validates after each of three rounds.
    assert counts.batches.pop("validate") == 3 * (1 if stage == "validate" else expected["validate"])
    assert min(expected.values()) > 1
    counts.batches["validate"] = 0
    for name in loaders:
        run = getattr(trainer, name)
        run(task, datamodule=digits, **({} if name == "predict" else {"verbose": False}))
    assert counts.batches == {"sanity": 0, **expected, stage: 1}


@pytest.mark.argument(
    "num_sanity_val_steps",
    "Supported. Number of validation batches before the first round. This validation does not change the result.",
)
@pytest.mark.parametrize("steps", [0, 1, -1])
def test_num_sanity_val_steps_does_not_change_training(fit, task, digits, assert_same, steps):
    counts, same = Counts(), Classifier(MLP([64, 16, 10]), 10, task.optimizer)
    same.load_state_dict(task.state_dict())
    fit(task, digits, [counts], max_epochs=1, trainer_args={"num_sanity_val_steps": steps})
    fit(same, digits, max_epochs=1, trainer_args={"num_sanity_val_steps": 0})
    assert counts.batches["sanity"] == (steps if steps >= 0 else len(digits.val_dataloader()))
    assert_same(task, same, 0)


@pytest.mark.argument(
    "check_val_every_n_epoch", "Supported. Number of rounds between validations. None raises an error."
)
def test_check_val_every_n_epoch_counts_rounds(fit, make_stream, make_task):
    counts = Counts()
    stream = make_stream(rounds_per_experience=3, validation=0.2)
    fit(make_task(), stream, [counts], trainer_args={"check_val_every_n_epoch": 2})
    assert counts.rounds == [1, 3, 5]


@pytest.mark.argument(
    "log_every_n_steps", "Supported. Counts the batches of all clients. A vectorized step counts as one batch."
)
@COHORTS
def test_log_every_n_steps_counts_batches_of_all_clients(fit, make_stream, make_task, tmp_path, max_vectorized_clients):
    logger, seen = CSVLogger(tmp_path, "", ""), []

    class Log(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(trainer.global_step)
            pl_module.log("batch", float(len(seen) - 1))

    arguments = {"logger": logger, "log_every_n_steps": 3}
    trainer = fit(
        make_task(), make_stream(), [Log()], trainer_args=arguments, max_vectorized_clients=max_vectorized_clients
    )
    lines = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    batch, step = lines[0].index("batch"), lines[0].index("step")
    logged = [(float(line[batch]), int(line[step])) for line in lines[1:] if line[batch]]
    assert logged == [(n, n) for n in range(2, trainer.global_step, 3)]
    # In hooks, `global_step` counts the steps of the current client.
    assert len(seen) == trainer.global_step > max(seen)


@pytest.mark.argument("enable_checkpointing", "Supported. Saves the server's state after each round.")
@pytest.mark.argument("default_root_dir", "Supported. Folder for checkpoints and logs.")
def test_checkpoints_are_saved_in_default_root_dir(fit, make_stream, make_task, tmp_path):
    fit(make_task(), make_stream(), trainer_args={"enable_checkpointing": False, "default_root_dir": tmp_path})
    assert not list(tmp_path.iterdir())
    task = make_task()
    fit(task, make_stream(), trainer_args={"enable_checkpointing": True, "default_root_dir": tmp_path, "logger": True})
    (path,), (_,) = tmp_path.rglob("epoch=1-*.ckpt"), tmp_path.rglob("hparams.yaml")
    kept = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, kept[name]) for name, value in task.state_dict().items())


@pytest.mark.argument("enable_model_summary", "Supported. Summarizes the module, which is the server's model.")
@pytest.mark.parametrize("shown", [True, False])
def test_enable_model_summary_prints_the_summary(fit, make_stream, make_task, capsys, shown):
    fit(make_task(), make_stream(), max_epochs=1, trainer_args={"enable_model_summary": shown})
    assert ("Trainable params: 59" in capsys.readouterr().out) == shown


FLAGS = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "detect_anomaly": torch.is_anomaly_enabled,
}


@pytest.fixture
def _flags_as_they_were(monkeypatch):
    """Restore PyTorch's flags and an environment variable, which Lightning does not reset."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.argument("deterministic", "Supported. Applies to the training steps of each client.")
@pytest.mark.argument("benchmark", "Supported. Applies to the training steps of each client.")
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.usefixtures("_flags_as_they_were")
def test_flags_apply_to_client_steps(fit, make_stream, make_task, assert_same, flag):
    tasks, seen = [], []
    for value in (False, True):
        task = make_task()
        task.model.register_forward_pre_hook(lambda *_: seen.append(FLAGS[flag]()))
        trainer = fit(task, make_stream(), trainer_args={flag: value}, max_vectorized_clients=1)
        assert set(seen) == {value} and len(seen) >= trainer.global_step  # The trial before the first round adds calls.
        seen.clear()
        tasks.append(task)
    assert_same(*tasks, 0)


@pytest.mark.argument(
    "detect_anomaly", "Supported. Applies to the training steps of each client, also in vectorized training."
)
@COHORTS
def test_detect_anomaly_raises_with_function(fit, make_stream, max_vectorized_clients):
    class Anomalous(Classifier):
        def sample_loss(self, output, y):
            return (output.sum(1) * 0).sqrt() * 0

    task = Anomalous(MLP([6, 5, 4]), 4, lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"):
        fit(task, make_stream(), trainer_args={"detect_anomaly": True}, max_vectorized_clients=max_vectorized_clients)


@pytest.mark.argument("inference_mode", "Supported. Applies to validation, tests and predictions.")
@pytest.mark.parametrize("mode", [True, False])
def test_inference_mode_applies_to_evaluation(fit, make_stream, make_task, mode):
    seen = {"train": set(), "validate": set(), "predict": set()}

    look = LambdaCallback(
        on_train_batch_end=lambda *_: seen["train"].add(torch.is_inference_mode_enabled()),
        on_validation_batch_end=lambda *_: seen["validate"].add(torch.is_inference_mode_enabled()),
        on_predict_batch_end=lambda *_: seen["predict"].add(torch.is_inference_mode_enabled()),
    )
    task, stream = make_task(), make_stream(validation=0.2)
    trainer = fit(task, stream, [look], trainer_args={"inference_mode": mode})
    # A fit of a plain Trainer does not use inference mode for validation either.
    assert seen.pop("validate") == {False}
    seen["validate"] = set()
    trainer.validate(task, datamodule=stream, verbose=False), trainer.predict(task, datamodule=stream)
    assert seen == {"train": {False}, "validate": {mode}, "predict": {mode}}


@pytest.mark.argument(
    "profiler", "Supported. Profiles the batches of all clients. A vectorized step counts as one batch."
)
@COHORTS
def test_profiler_records_batches_of_all_clients(fit, make_stream, make_task, assert_same, max_vectorized_clients):
    task, same, profiler = make_task(), make_task(), SimpleProfiler()
    trainer = fit(
        task, make_stream(), trainer_args={"profiler": profiler}, max_vectorized_clients=max_vectorized_clients
    )
    fit(same, make_stream(), max_vectorized_clients=max_vectorized_clients)
    assert len(profiler.recorded_durations["run_training_batch"]) == trainer.global_step
    assert_same(task, same, 0)


@pytest.mark.argument("barebones", "Supported. Gives the same results without logging, progress bars or checkpoints.")
def test_barebones_trains_equally(fit, make_stream, make_task, assert_same):
    bare, same = make_task(), make_task()
    trainer = fit(bare, make_stream(), trainer_args={"barebones": True})
    fit(same, make_stream())
    assert_same(bare, same, 0)
    assert not trainer.loggers and not trainer.callback_metrics


@pytest.mark.seconds
@pytest.mark.argument("sync_batchnorm", "Supported. Has no effect, because each batch of a client is in one process.")
@pytest.mark.argument(
    "use_distributed_sampler", "Supported. Has no effect, because each process trains different clients."
)
@pytest.mark.parametrize("arguments", [{"sync_batchnorm": True}, {"use_distributed_sampler": False}], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
def test_sync_batchnorm_and_sampler_arguments_do_not_change_results(
    fit, make_stream, make_task, assert_same, arguments, devices
):
    tasks, batches = [], []
    for more in ({}, arguments):
        torch.manual_seed(0)
        task = make_task(model=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))
        strategy = FederatedStrategy(start_method="fork", max_vectorized_clients=1)
        options = {"devices": devices if more else 1, **more}
        trainer = fit(task, make_stream(drop_last=True, validation=0.2), strategy=strategy, trainer_args=options)
        tasks.append(task)
        batches.append(float(trainer.callback_metrics["val/accuracy"]))
    assert type(task.model[1]) is nn.BatchNorm1d
    assert_same(*tasks, 0)
    # The logged value is the accuracy on all validation samples.
    assert batches[0] == batches[1]


@pytest.mark.argument("plugins", "Supported for precision, the cluster environment and checkpoint IO.")
def test_plugins_are_used(fit, make_stream, make_task, assert_same, tmp_path):
    written = []

    class Own(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            written.append(checkpoint["epoch"])

    task, same, environment = make_task(), make_task(), LightningEnvironment()
    arguments = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    plugins = [DoublePrecision(), environment, Own()]
    trainer = fit(task, make_stream(), trainer_args={"plugins": plugins, **arguments})
    fit(same, make_stream(), trainer_args={"precision": "64-true"})
    assert_same(task, same, 0)
    assert written == [0, 1] and trainer.strategy.cluster_environment is environment


@pytest.mark.argument(
    "enable_autolog_hparams", "Supported. Whether loggers get the hyperparameters of the module and the stream."
)
@pytest.mark.parametrize("logs", [True, False])
def test_enable_autolog_hparams_logs_hyperparameters(fit, make_stream, make_task, tmp_path, logs):
    logger = CSVLogger(tmp_path, "", "")
    fit(make_task(), make_stream(), trainer_args={"logger": logger, "enable_autolog_hparams": logs})
    assert ("num_classes" in logger.experiment.hparams) == logs


@pytest.mark.argument("model_registry", "Supported. The package `litmodels` uploads checkpoints after rounds.")
def test_model_registry_gets_checkpoints_of_rounds(fit, make_stream, make_task, tmp_path, monkeypatch):
    sent = []

    class Sends(ModelCheckpoint):
        def __init__(self, model_registry):
            super().__init__(save_top_k=-1)
            self.registry = model_registry

        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            sent.append((self.registry, trainer.current_epoch))

    module = ModuleType("litmodels.integrations.checkpoints")
    module.LightningModelCheckpoint = Sends
    for name in ("litmodels", "litmodels.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(callback_connector, "RequirementCache", lambda what: "litmodels" in what)
    arguments = {"model_registry": "own", "enable_checkpointing": True, "default_root_dir": tmp_path}
    fit(make_task(), make_stream(), trainer_args=arguments)
    assert sent == [("own", 0), ("own", 1)]
