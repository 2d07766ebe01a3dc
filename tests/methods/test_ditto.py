"""Tests of Ditto: the shared model equals FedAvg's model, and the personal model follows the paper's formula."""

import pytest
import torch
from raising import raises

from lightning_fcl.callbacks import APFL, Ditto
from lightning_fcl.errors import InvalidValueError

from .test_apfl import OPTIMIZERS, by_hand


def personal(trainer, client):
    memory = trainer.strategy.server.client_store[client]["Ditto"]
    return {name[2:]: value for name, value in memory.items() if name.startswith("v.")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ditto_equals_hand_written_algorithm(fit, make_stream, make_task, assert_same, optimizer):
    task, stream = make_task(OPTIMIZERS[optimizer]), make_stream(rounds_per_experience=2)
    stream.setup("fit")
    w, v, _ = by_hand(task, stream, 1.0, 0.0, strength=0.7)
    trainer = fit(task, stream, [Ditto(0.7)], seed=0)
    assert_same(task, w, 1e-5)
    for client, own in v.items():
        torch.testing.assert_close(personal(trainer, client), dict(own.state_dict()), rtol=0, atol=2e-5)
        assert (own.model[1].weight - w.model[1].weight).abs().max() > 1e-3


def test_ditto_zero_strength_bitwise_equals_local_training(fit, make_stream, make_task):
    options = {"max_vectorized_clients": 1, "local_epochs": 2, "seed": 0}
    ditto = fit(make_task(), make_stream(rounds_per_experience=2), [Ditto(0.0)], **options)
    local = fit(make_task(), make_stream(rounds_per_experience=2), reductions={"*": "local"}, **options)
    for client in "012":
        torch.testing.assert_close(
            personal(ditto, client), local.strategy.server.client_store[client]["model"], rtol=0, atol=0
        )


def test_ditto_with_apfl_equals_ditto_alone(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(), [Ditto(0.3), APFL(0.5)], max_epochs=1, seed=0)
    alone = fit(make_task(), make_stream(), [Ditto(0.3)], max_epochs=1, seed=0)
    torch.testing.assert_close(personal(trainer, "0"), personal(alone, "0"), rtol=0, atol=0)


def test_ditto_with_accumulated_gradients_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "accumulate_grad_batches"):
        fit(make_task(), make_stream(), [Ditto()], trainer_args={"accumulate_grad_batches": 2})
