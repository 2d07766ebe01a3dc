"""Tests of MOON: features move toward the server model's features and away from the previous model's features."""

import copy

import pytest
import torch
import torch.nn.functional as F

from lightning_fcl.callbacks import MOON
from lightning_fcl.methods.distillation import contrastive_loss
from lightning_fcl.models import MLP


def by_formula(features, near, far, temperature):
    """Return the model-contrastive loss of each sample, computed by the paper's formula."""
    losses = []
    for z, a, b in zip(features, near, far, strict=True):
        s_near, s_far = (torch.exp((z @ t) / (z.norm() * t.norm()) / temperature) for t in (a, b))
        losses.append(-torch.log(s_near / (s_near + s_far)))
    return torch.stack(losses)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_contrastive_loss_equals_paper(temperature):
    torch.manual_seed(0)
    features, near, far = torch.randn(3, 7, 5)
    torch.testing.assert_close(
        contrastive_loss(features, near, far, temperature), by_formula(features, near, far, temperature)
    )
    assert (contrastive_loss(near, near, far) < contrastive_loss(far, near, far)).all()


def test_moon_federation_equals_paper_algorithm(fit, make_stream, make_task, assert_same):
    stream, task = make_stream(rounds_per_experience=2, shuffle=False), make_task(model=MLP([6, 16, 4]))
    stream.setup("fit")
    w, previous = copy.deepcopy(task), {}
    for current in stream.plan.train:
        uploads = []
        for client, rows in current.items():
            model, (x, y) = copy.deepcopy(w), stream.get_samples(rows)
            optimizer, far = model.configure_optimizers(), previous.get(client, w)
            for indices in [*torch.arange(len(y)).split(8)] * 2:
                inputs = x[indices]
                optimizer.zero_grad()
                teachers = (teacher.embed(inputs).detach() for teacher in (w, far))
                contrast = by_formula(model.embed(inputs), *teachers, 0.5).mean()
                (F.cross_entropy(model(inputs), y[indices]) + 2.0 * contrast).backward()
                optimizer.step()
            previous[client] = model
            uploads.append((len(y), model.state_dict()))
        total = sum(n for n, _ in uploads)
        w.load_state_dict({name: sum(n * state[name] for n, state in uploads) / total for name in w.state_dict()})
    for size in (1, "auto"):
        own = copy.deepcopy(task)
        trainer = fit(own, make_stream(rounds_per_experience=2, shuffle=False), [MOON(2.0)],
                  max_vectorized_clients=size,
                      local_epochs=2, seed=0)  # fmt: skip
        assert_same(own, w, 1e-5)
        kept = {name[4:]: value for name, value in trainer.strategy.server.client_store["1"]["MOON"].items()}
        torch.testing.assert_close(kept, dict(previous["1"].state_dict()), rtol=0, atol=1e-5)
