"""Ditto: the shared model trains as without it; the personal one by the paper's formula."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_fcl.callbacks import APFL, Ditto
from lightning_fcl.data.batches import Batching, order_keys, plan_batches

from .test_apfl import OPTIMIZERS


def personal(trainer, client):
    memory = trainer.strategy.server.store[client]["Ditto"]
    return {name[2:]: value for name, value in memory.items() if name.startswith("v.")}


def by_hand(task, stream, strength):
    """Algorithm 1 of the paper, with the task's optimizer for w and for v."""
    w, v = copy.deepcopy(task), {client: copy.deepcopy(task) for client in stream.plan.clients}
    for round, current in enumerate(stream.plan.train):
        uploads = []
        for client, rows in current.items():
            local, own = copy.deepcopy(w), v[client]
            optimizers = local.configure_optimizers(), own.configure_optimizers()
            x, y = stream.take(rows)
            order = order_keys(0, [client], round)
            for indices in plan_batches(len(y), 1, Batching(stream.batch_size, stream.shuffle), order):
                for model, optimizer in zip((local, own), optimizers, strict=True):
                    optimizer.zero_grad()
                    cross_entropy(model(x[indices]), y[indices]).backward()
                for q, p in zip(own.parameters(), w.parameters(), strict=True):
                    q.grad += strength * (q - p).detach()
                for optimizer in optimizers:
                    optimizer.step()
            uploads.append((len(y), local.state_dict()))
        total = sum(n for n, _ in uploads)
        w.load_state_dict({name: sum(n * state[name] for n, state in uploads) / total for name in w.state_dict()})
    return w, v


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_the_papers_algorithm_by_hand(fit, make_stream, make_task, assert_same, optimizer):
    task, stream = make_task(OPTIMIZERS[optimizer]), make_stream(rounds_per_experience=2)
    stream.setup("fit")
    w, v = by_hand(task, stream, 0.7)
    trainer = fit(task, stream, [Ditto(0.7)], seed=0)
    assert_same(task, w, 1e-5)
    for client, own in v.items():
        torch.testing.assert_close(personal(trainer, client), dict(own.state_dict()), rtol=0, atol=2e-5)
        assert (own.model[1].weight - w.model[1].weight).abs().max() > 1e-3


def test_without_weight_the_personal_model_is_a_local_one_to_the_bit(fit, make_stream, make_task):
    options = {"cohort_size": 1, "local_epochs": 2, "seed": 0}
    ditto = fit(make_task(), make_stream(rounds_per_experience=2), [Ditto(0.0)], **options)
    local = fit(make_task(), make_stream(rounds_per_experience=2), reductions={"*": "none"}, **options)
    for client in "012":
        torch.testing.assert_close(
            personal(ditto, client), local.strategy.server.store[client]["model"], rtol=0, atol=0
        )


@pytest.mark.parametrize("keep", [False, True])
def test_resumed_is_uninterrupted(assert_resumes, make_task, keep):
    def make(seed=0):
        return make_task(OPTIMIZERS["momentum"], seed=seed)

    assert_resumes(make, lambda: Ditto(0.3), keep_optimizer=keep)


def test_it_goes_beside_apfl(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(), [Ditto(0.3), APFL(0.5)], max_epochs=1, seed=0)
    alone = fit(make_task(), make_stream(), [Ditto(0.3)], max_epochs=1, seed=0)
    torch.testing.assert_close(personal(trainer, "0"), personal(alone, "0"), rtol=0, atol=0)


def test_accumulated_gradients_are_refused(fit, make_stream, make_task):
    with pytest.raises(ValueError, match="Expected `accumulate_grad_batches=1` for `Ditto`"):
        fit(make_task(), make_stream(), [Ditto()], trainer_args={"accumulate_grad_batches": 2})
