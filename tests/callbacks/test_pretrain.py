"""Tests of pre-training before the first round."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from raising import raises

from lightning_fcl.callbacks import Pretrain
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.rng import derive_seed

SCENARIO = {"num_rounds": 2, "samples_per_round": 12, "test_per_class": 5, "pretrain_per_class": 6}


@pytest.fixture
def make_flwf(make_stream):
    def make(**kwargs):
        return make_stream(scenario="flwf", **SCENARIO, **kwargs)

    return make


class Start(Callback):
    """Stores the state that the first round starts from."""

    def on_train_start(self, trainer, pl_module):
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


def pretrained(fit, task, stream, epochs=5, others=()):
    start = Start()
    fit(task, stream, [Pretrain(epochs), start, *others])
    return start.state


def test_pretrain_equals_hand_written_loop(fit, make_flwf, make_task):
    stream, task, by_hand = make_flwf(), make_task(), make_task()
    state = pretrained(fit, task, stream)
    torch.manual_seed(derive_seed(0, "pretrain"))
    loader, optimizer = stream.pretrain_dataloader(), by_hand.configure_optimizers()
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(by_hand(x), y).backward()
            optimizer.step()
    torch.testing.assert_close(state, dict(by_hand.state_dict()), rtol=0, atol=1e-6)
    begun = make_task().state_dict()
    assert all((value - begun[name]).abs().max() > 1e-3 for name, value in state.items())
    assert stream.get_samples(stream.plan.pretrain)[1].bincount().tolist() == [6] * 4


def test_pretrain_depends_only_on_stream_seed(fit, make_flwf, make_task):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))
        states.append(pretrained(fit, make_task(), make_flwf(seed=seed)))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert not torch.equal(states[0]["model.1.weight"], states[2]["model.1.weight"])


def test_pretrain_task_keeps_its_trainer(fit, make_flwf, make_task):
    task = make_task()
    trainer = fit(task, make_flwf(), [Pretrain(1)])
    assert task.trainer is trainer and trainer.current_epoch == 2


def test_pretrain_resumed_fit_does_not_pretrain_again(fit, make_flwf, make_task, tmp_path):
    task, again, start = make_task(), make_task(seed=1), Start()
    trainer = fit(task, make_flwf(), [Pretrain(3)], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "round.ckpt")
    fit(again, make_flwf(), [Pretrain(3), start], ckpt_path=tmp_path / "round.ckpt")
    torch.testing.assert_close(start.state, dict(task.state_dict()), rtol=0, atol=0)


def test_pretrain_without_samples_or_epochs_raises(fit, make_stream, make_task, samples, train):
    with raises(InvalidValueError, "scenario"):
        fit(make_task(), make_stream(), [Pretrain(1)])
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "epochs"):
        Pretrain(0)
    with raises(InvalidValueError, "datamodule"):
        train(make_task(), [Pretrain(1)], samples())
