"""Tests of Lightning's callbacks: they work on clients' batches and the server's model, or raise an error."""

import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from raising import raises

from lightning_fcl.errors import InvalidValueError

COHORTS = pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])


def column(folder, name):
    """Return the values of a column that a CSVLogger has written."""
    names, *lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    return [float(line[names.index(name)]) for line in lines if line[names.index(name)]]


@pytest.mark.callback("BaseFinetuning", "Supported. Layers can be frozen or unfrozen at each round, for all clients.")
@COHORTS
def test_base_finetuning_unfreezes_layers_at_a_round(fit, make_stream, make_task, max_vectorized_clients):
    class Own(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model[1])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group(pl_module.model[1], optimizer)

    task, seen = make_task(), []
    before = task.model[1].weight.clone()
    head = task.model[3].parameters
    task.configure_optimizers = lambda: torch.optim.SGD(head(), lr=0.1)
    look = LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(module.model[1].weight.clone()))
    fit(task, make_stream(rounds_per_experience=2), [Own(), look], max_vectorized_clients=max_vectorized_clients)
    assert [torch.equal(weight, before) for weight in seen] == [True, True, False, False]


@pytest.mark.callback(
    "Checkpoint", "Supported. A custom subclass can save after rounds. Within a round there is no state to resume from."
)
def test_custom_checkpoint_saves_the_server_state(fit, make_stream, make_task, assert_same, tmp_path):
    class Own(Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    task, again = make_task(), make_task(seed=1)
    fit(task, make_stream(), [Own()], trainer_args={"enable_checkpointing": True}, max_vectorized_clients=1)
    fit(again, make_stream(), ckpt_path=tmp_path / "0.ckpt", max_vectorized_clients=1)
    assert_same(task, again, 0)


@pytest.mark.callback(
    "LambdaCallback", "Supported. Batches are the batches of one client after another. Epochs are rounds."
)
@COHORTS
def test_lambda_callback_hooks_run_for_batches_and_rounds(fit, make_stream, make_task, max_vectorized_clients):
    seen = []
    hooks = {"on_train_batch_end": lambda *_: seen.append("batch"), "on_train_epoch_end": lambda *_: seen.append("end")}
    trainer = fit(make_task(), make_stream(), [LambdaCallback(**hooks)], max_vectorized_clients=max_vectorized_clients)
    assert seen.count("end") == 2 and seen[-1] == "end" and seen.count("batch") == trainer.global_step


@pytest.mark.callback("DeviceStatsMonitor", "Supported. Logs statistics of the process for the batches of all clients.")
def test_device_stats_monitor_logs_each_batch(fit, make_stream, make_task, tmp_path):
    arguments = {"logger": CSVLogger(tmp_path, "", ""), "log_every_n_steps": 1}
    pytest.importorskip("psutil")
    trainer = fit(make_task(), make_stream(), [DeviceStatsMonitor(cpu_stats=True)], trainer_args=arguments)
    found = column(tmp_path, "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent")
    assert len(found) == trainer.global_step and all(0 < value <= 100 for value in found)


@pytest.mark.callback(
    "ThroughputMonitor", "Supported. Counts the batches of all clients. A vectorized step counts as one batch."
)
@COHORTS
def test_throughput_monitor_counts_batches_of_all_clients(
    fit, make_stream, make_task, tmp_path, max_vectorized_clients
):
    sizes = []

    def count(batch):
        sizes.append(batch[1].numel())
        return sizes[-1]

    arguments = {"logger": CSVLogger(tmp_path, "", ""), "log_every_n_steps": 1}
    callbacks = [ThroughputMonitor(count, window_size=3)]
    trainer = fit(
        make_task(), make_stream(), callbacks, trainer_args=arguments, max_vectorized_clients=max_vectorized_clients
    )
    assert len(sizes) == trainer.global_step
    assert column(tmp_path, "train/samples") == [sum(sizes[: n + 1]) for n in range(len(sizes))]


@pytest.mark.callback("ModelSummary", "Supported. Summarizes the module, which is the server's model.")
@pytest.mark.callback("RichModelSummary", "Supported. Summarizes the module, which is the server's model.")
@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
def test_model_summaries_are_printed(fit, make_stream, make_task, caplog, capsys, kind):
    caplog.set_level("INFO", "lightning.pytorch")
    fit(make_task(), make_stream(), [kind(2)], max_epochs=1, trainer_args={"enable_model_summary": True})
    said = capsys.readouterr().out + caplog.text
    assert "Trainable params" in said and "59" in said and "model.3" in said


@pytest.mark.callback(
    "ProgressBar", "Supported. In a custom subclass, an epoch is a round with the batches of all clients."
)
@pytest.mark.callback("TQDMProgressBar", "Supported. One bar per round counts the batches of all clients.")
@pytest.mark.parametrize("kind", [ProgressBar, TQDMProgressBar])
@COHORTS
def test_progress_bar_counts_batches_of_a_round(fit, make_stream, make_task, kind, max_vectorized_clients):
    seen = []

    class Own(kind):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            seen.append((trainer.current_epoch, batch_idx + 1, self.total_train_batches))

    fit(
        make_task(),
        make_stream(),
        [Own()],
        trainer_args={"enable_progress_bar": True},
        max_vectorized_clients=max_vectorized_clients,
    )
    for round_idx in (0, 1):
        counts = [(done, total) for epoch, done, total in seen if epoch == round_idx]
        assert counts == [(n + 1, len(counts)) for n in range(len(counts))]


@pytest.mark.callback("BatchSizeFinder", "Not supported. The callback would end within a round. Set `batch_size`.")
@pytest.mark.callback(
    "LearningRateFinder", "Not supported. The callback would end within a round. Use `lightning-fcl tune`."
)
@pytest.mark.callback(
    "ModelPruning", "Not supported. The server would average the pruning masks. Prune the model after the fit."
)
@pytest.mark.callback(
    "GradientAccumulationScheduler",
    "Not supported. The callback would accumulate gradients of different clients. Set `accumulate_grad_batches`.",
)
@pytest.mark.callback(
    "StochasticWeightAveraging",
    "Not supported. The callback would average models of different clients. Use `ServerWeightAveraging`.",
)
@pytest.mark.callback(
    "WeightAveraging",
    "Not supported. The callback would average models of different clients. Use `ServerWeightAveraging`.",
)
@pytest.mark.callback(
    "EMAWeightAveraging",
    "Not supported. The callback would average models of different clients. Use `ServerWeightAveraging`.",
)
@pytest.mark.callback(
    "SpikeDetection",
    "Not supported. The callback would compare losses of different clients. "
    'Non-finite uploads are dropped anyway. For other outliers, set `reductions={"*": "median"}`.',
)
@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (LearningRateFinder(), "lightning-fcl tune"),
        (BatchSizeFinder(), "Set `batch_size`"),
        (ModelPruning("l1_unstructured", amount=0.5), "Prune the model after the fit"),
        (GradientAccumulationScheduler({0: 4}), "Set `accumulate_grad_batches`"),
        (StochasticWeightAveraging(0.1), "`ServerWeightAveraging(decay=None)` .*`SWALR`"),
        (WeightAveraging(), "`ServerWeightAveraging(decay=None)`"),
        (EMAWeightAveraging(), "`ServerWeightAveraging(decay=0.9)`"),
        (SpikeDetection(), '`FederatedStrategy(reductions={"*": "median"})`'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_mix_clients_raise(fit, make_stream, make_task, callback, remedy):
    with raises(InvalidValueError, "callbacks", value=type(callback).__name__) as caught:
        fit(make_task(), make_stream(), [callback])
    assert all(part in caught.value.hint for part in remedy.split(" .*"))
