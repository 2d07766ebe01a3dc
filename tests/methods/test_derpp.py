"""Tests of DER++: the stored samples and logits, and the penalty."""

import pytest
import torch
import torch.nn.functional as F
from kept import memory_of

from lightning_fcl.callbacks import DERpp
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.functional import predictions


def step_of(task, x, y, **kwargs):
    """Return a `Step` of a task for a direct call of a method, without the method driver."""
    nothing = {"params": dict(task.named_parameters()), "received_state": {}, "teacher_forward": lambda state, x: x}
    return Step(
        **nothing, x=x, y=y, output=task(x), forward_fn=task, loss_fn=lambda x, y: F.cross_entropy(task(x), y), **kwargs
    )


def test_derpp_penalty_uses_two_halves_of_drawn_samples(make_task, samples):
    task, (x, y), logits = make_task(), samples(), torch.randn(20, 4)
    step = step_of(task, x, y, replay_samples={"x": x[:6], "y": y[:6], "logits": logits[:6]}, replay_weight=1.0)
    expected = F.mse_loss(task(x[:3]), logits[:3]) + 2 * F.cross_entropy(task(x[3:6]), y[3:6])
    found = DERpp(alpha=1, beta=2, batch_size=3).penalty(Client(), step)
    torch.testing.assert_close(found, expected)
    ours, by_hand = (torch.autograd.grad(value, [*task.parameters()]) for value in (found, expected))
    torch.testing.assert_close(ours, by_hand)


def test_derpp_stores_logits_of_trained_model(make_task, samples, train):
    method, task, data = DERpp(6, batch_size=4), make_task(), samples()
    train(task, [method], data, epochs=1)
    first = memory_of(method)
    assert len(first["y"]) == 6
    torch.testing.assert_close(first["logits"], predictions(task, task.state_dict(), first["x"]))
    rows = [int((data[0] == x).all(dim=1).nonzero()) for x in first["x"]]
    assert torch.equal(first["y"], data[1][rows]) and len(set(rows)) == 6
    train(task, [method], samples(seed=1), epochs=1)
    stayed = [
        (i, j) for i, x in enumerate(first["x"]) for j, z in enumerate(memory_of(method)["x"]) if torch.equal(x, z)
    ]
    assert 0 < len(stayed) < 6
    # A sample that stays in the buffer keeps the logits that were stored with the sample.
    for i, j in stayed:
        assert torch.equal(memory_of(method)["logits"][j], first["logits"][i])


@pytest.mark.seconds
def test_derpp_reservoir_samples_uniformly(make_task, train, samples):
    counts, method, task = torch.zeros(20), DERpp(5), make_task()
    x = torch.arange(20.0)[:, None].expand(20, 6)
    for seed in range(400):
        generator, memory = torch.Generator().manual_seed(seed), {}
        for part in x.split(4):
            data = [part, torch.zeros(len(part), dtype=torch.long)]
            memory = method.update_client_state(
                Client(memory, client_round=ClientRound("a", 0), module=task, generator=generator),
                task.state_dict(),
                data,
            )
        counts[memory["x"][:, 0].long()] += 1
    assert counts.sum() == 2000
    assert (counts - 100).abs().max() < 4.5 * (400 * 0.25 * 0.75) ** 0.5
