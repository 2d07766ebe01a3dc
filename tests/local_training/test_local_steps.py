"""Tests of local optimizer steps: gradient accumulation and step schedules, compared with hand-written loops."""

import copy

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import APFL, FedProx, FLwF2T, Replay
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.simulation.hooks import FitHooks

STREAM = {"partition": "dirichlet", "num_clients": 5, "rounds_per_experience": 2}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
}
SCHEDULES = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=12),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.8),
    "one cycle of learning rate and momentum": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=60),
}


def by_hand(task, stream, make, every=1, epochs=2, schedule=None, frequency=1, by_round=None, clip=None):
    """Return the state after FedAvg with local gradient accumulation and step schedules.

    Each client steps its optimizer after ``every`` batches and after its last batch. The schedule steps after
    ``frequency`` optimizer steps. ``by_round`` is the factor of the learning rate between rounds.
    """
    server, factor = copy.deepcopy(task.state_dict()), 1.0
    for round_idx in range(stream.plan.num_rounds):
        sums, total = {}, 0
        for client, rows in stream.plan.train[round_idx].items():
            local = copy.deepcopy(task)
            local.load_state_dict(server)
            optimizer = make(local.parameters())
            for group in optimizer.param_groups:
                group["lr"] *= factor
            scheduler = schedule(optimizer) if schedule else None
            x, y = stream.get_samples(rows)
            keys = order_keys(0, [client], round_idx)
            batches = plan_batches(len(y), epochs, BatchPlan(stream.batch_size, stream.shuffle), keys)
            steps = 0
            for number, chosen in enumerate(batches, 1):
                (nn.functional.cross_entropy(local.model(x[chosen]), y[chosen]) / every).backward()
                if number % every == 0 or number == len(batches):
                    if clip:
                        nn.utils.clip_grad_norm_(local.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                    if scheduler and steps % frequency == 0:
                        scheduler.step()
            for name, value in local.state_dict().items():
                sums[name] = sums.get(name, 0) + len(y) * value.double()
            total += len(y)
        server = {name: (value / total).float() for name, value in sums.items()}
        factor *= by_round or 1.0
    return server


def near(left, right, tolerance=1e-6):
    torch.testing.assert_close(dict(left), dict(right), rtol=0, atol=tolerance)


def differ(left, right):
    return max(float((left[name] - right[name]).abs().max()) for name in left) > 1e-3


@pytest.mark.argument(
    "accumulate_grad_batches",
    "Supported. Counts the batches of one client. The last step of a client may use fewer batches.",
)
@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, 2, "auto"])
@pytest.mark.parametrize(
    ("optimizer", "every", "clip"),
    [("sgd", 3, None), ("sgd", 3, 0.2), ("momentum", 2, None), ("adam", 3, None), ("adam", 1000, None)],
)
def test_accumulate_grad_batches_equals_hand_written_loop(
    fit, make_stream, make_task, optimizer, every, clip, max_vectorized_clients
):
    """The gradient is clipped once per optimizer step, after accumulation."""
    stream, task = make_stream(**STREAM), make_task(OPTIMIZERS[optimizer])
    start = copy.deepcopy(task)
    trainer_args = {"accumulate_grad_batches": every, "gradient_clip_val": clip}
    trainer = fit(
        task, stream, trainer_args=trainer_args, max_vectorized_clients=max_vectorized_clients, local_epochs=2, seed=0
    )
    expected = by_hand(start, stream, OPTIMIZERS[optimizer], every, clip=clip)
    near(task.state_dict(), expected)
    assert differ(expected, by_hand(start, stream, OPTIMIZERS[optimizer], every if clip else 1))
    assert trainer.accumulate_grad_batches == every  # The fit restores the user's value.
    lengths = {-(-len(rows) // 8) % 2 for current in stream.plan.train for rows in current.values()}
    # Some clients have an even number of batches per epoch, and some have an odd number. With an odd number, a
    # group of two batches spans both epochs.
    assert lengths == {0, 1}


@pytest.mark.seconds
def test_accumulation_with_penalties_vectorized_equals_sequential(fit, make_stream, make_task):
    states = []
    for size in (1, "auto"):
        task = make_task(OPTIMIZERS["momentum"])
        methods = [Replay(9, "class-balanced", "round"), FLwF2T(0.3, 0.3), FedProx(0.5)]
        arguments = {"accumulate_grad_batches": 3}
        fit(
            task,
            make_stream(**STREAM),
            methods,
            trainer_args=arguments,
            max_vectorized_clients=size,
            local_epochs=2,
            seed=0,
        )
        states.append(task.state_dict())
    near(*states)


def test_accumulated_penalty_equals_penalty_of_full_batch(fit, make_stream, make_task):
    # The mean loss over a batch of 8 equals the mean of the losses of its two halves.
    states = []
    for size, every in ((4, 2), (8, 1)):
        task, stream = make_task(), make_stream(num_clients=1, samples=80, batch_size=size)
        fit(
            task,
            stream,
            [FedProx(0.5)],
            trainer_args={"accumulate_grad_batches": every},
            max_vectorized_clients=1,
            seed=0,
        )
        states.append(task.state_dict())
    near(*states)


def scheduled(make_task, optimizer, *schedules):
    task = make_task()

    def configure():
        made = OPTIMIZERS[optimizer](task.parameters())
        return [made], [{"frequency": 1, **rest, "scheduler": schedule(made)} for schedule, rest in schedules]

    task.configure_optimizers = configure
    return task


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, 2, "auto"])
@pytest.mark.parametrize(("schedule", "optimizer"), list(zip(SCHEDULES, ("adam", "sgd", "momentum"), strict=True)))
def test_step_schedules_restart_for_each_client(
    fit, make_stream, make_task, schedule, optimizer, max_vectorized_clients, recwarn
):
    stream = make_stream(**STREAM)
    task = scheduled(make_task, optimizer, (SCHEDULES[schedule], {"interval": "step"}))
    start = make_task()
    fit(task, stream, max_vectorized_clients=max_vectorized_clients, local_epochs=2, seed=0)
    expected = by_hand(start, stream, OPTIMIZERS[optimizer], schedule=SCHEDULES[schedule])
    near(task.state_dict(), expected)
    assert differ(expected, by_hand(start, stream, OPTIMIZERS[optimizer]))
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_step_schedule_counts_optimizer_steps_with_epoch_schedule(fit, make_stream, make_task, max_vectorized_clients):
    stream, inner = make_stream(**STREAM), SCHEDULES["exponential"]
    by_step = (inner, {"interval": "step", "frequency": 2})
    by_round = (lambda optimizer: StepLR(optimizer, 1, gamma=0.5), {"interval": "epoch"})
    task, start = scheduled(make_task, "sgd", by_step, by_round), make_task()
    fit(
        task,
        stream,
        trainer_args={"accumulate_grad_batches": 2},
        max_vectorized_clients=max_vectorized_clients,
        local_epochs=2,
        seed=0,
    )
    words = {"schedule": inner, "frequency": 2}
    near(task.state_dict(), by_hand(start, stream, OPTIMIZERS["sgd"], 2, by_round=0.5, **words))
    assert differ(task.state_dict(), by_hand(start, stream, OPTIMIZERS["sgd"], 2, **words))


@pytest.mark.seconds
def test_accumulation_and_schedule_resumed_or_interrupted(fit, make_stream, make_task, tmp_path):
    class Stop(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 3:
                raise ValueError("enough")

    def task():
        return scheduled(make_task, "momentum", (SCHEDULES["exponential"], {"interval": "step"}))

    arguments = {"accumulate_grad_batches": 2}
    options = {"max_vectorized_clients": 1, "seed": 0, "trainer_args": arguments}
    whole, cut, rest = task(), task(), task()
    fit(whole, make_stream(**STREAM), **options)
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    with pytest.raises(ValueError, match="enough"):
        saving = {**options, "trainer_args": {**arguments, "enable_checkpointing": True}}
        fit(cut, make_stream(**STREAM), [Stop(), saver], **saving)
    assert cut.trainer.optimizers[0].param_groups[0]["lr"] == 0.05
    assert cut.trainer.accumulate_grad_batches == 2
    fit(rest, make_stream(**STREAM), ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())
    with raises(InvalidValueError, "accumulate_grad_batches", value=2, code="other-recipe"):
        options["trainer_args"] = {**arguments, "accumulate_grad_batches": 3}
        fit(task(), make_stream(**STREAM), ckpt_path=tmp_path / "epoch=0.ckpt", **options)


def test_unsupported_step_schedules_and_accumulation_raise(fit, make_stream, make_task):
    plateau = (ReduceLROnPlateau, {"interval": "step", "monitor": "train/loss"})
    with raises(InvalidValueError, "interval"):
        fit(scheduled(make_task, "sgd", plateau), make_stream())
    by_hand = scheduled(make_task, "sgd", (SCHEDULES["cosine"], {"interval": "step"}))
    by_hand.automatic_optimization = False
    with raises(InvalidValueError, "interval"):
        fit(by_hand, make_stream())
    with raises(InvalidValueError, "accumulate_grad_batches"):
        fit(make_task(), make_stream(), [APFL()], trainer_args={"accumulate_grad_batches": 2})


class Gradients(Callback):
    """Records the gradient norm at each `on_before_zero_grad`, or None without a gradient."""

    def __init__(self):
        self.norms = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(None if gradients[0] is None else float(nn.utils.get_total_norm(gradients)))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_zero_grad_hook_called_as_often_as_in_plain_trainer(fit, train, make_task, every, monkeypatch):
    class Own(Classifier):
        def on_before_zero_grad(self, optimizer):
            zeroed.append(optimizer)

    zeroed, plain, federated, together = [], Gradients(), Gradients(), []
    words = {"scenario": ClassIncremental(1), "split": Split(test=0.0), "batch_size": 8, "shuffle": False, "seed": 0}
    x, y = torch.randn(80, 6), torch.arange(80) % 4
    one, two = (FederatedStream.from_arrays(x[:n], y[:n], np.arange(n) // 40, **words) for n in (40, 80))
    arguments = {"accumulate_grad_batches": every}
    train(make_task(), [plain], (x[:40], y[:40]), epochs=1, **arguments)
    task = make_task()
    fit(Own(task.model, 4, task.optimizer), one, [federated], trainer_args=arguments, max_vectorized_clients=1)
    assert federated.norms == pytest.approx(plain.norms) and len(zeroed) == len(plain.norms) == -(-5 // every)
    fit(Own(task.model, 4, task.optimizer), two, trainer_args=arguments)
    assert len(zeroed) == 3 * len(plain.norms)  # The first fit has one client, and this fit has two clients.
    look = classmethod(lambda _, trainer, *__: together.append(trainer.accumulate_grad_batches))
    # Patch the library's hook, because a user callback on this hook would make training sequential.
    monkeypatch.setattr(FitHooks, "on_before_zero_grad", look)
    trainer = fit(make_task(), two, trainer_args=arguments, max_vectorized_clients=2)
    assert together == [every] * len(plain.norms) and trainer.accumulate_grad_batches == every


def test_lbfgs_with_accumulate_grad_batches_raises(fit, make_stream, make_task):
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2)

    with raises(InvalidValueError, "accumulate_grad_batches", value=2):
        fit(make_task(lbfgs), make_stream(**STREAM), trainer_args={"accumulate_grad_batches": 2})
