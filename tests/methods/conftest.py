"""Methods in a plain Trainer, and the same training written by hand."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture
def samples():
    """Makes samples and labels of some classes."""

    def make(classes=(0, 1, 2, 3), number=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        y = torch.tensor(classes).repeat(number)[torch.randperm(number * len(classes), generator=generator)][:number]
        return torch.randn(number, 6, generator=generator), y

    return make


@pytest.fixture
def train(quiet):
    """Fits in a plain Trainer, in the order of the data."""

    def run(task, callbacks, data, epochs=2, collate=None, ckpt_path=None, **kwargs):
        trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**quiet, **kwargs})
        trainer.fit(task, DataLoader(TensorDataset(*data), batch_size=8, collate_fn=collate), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def by_hand():
    """A training loop in plain PyTorch."""

    def run(task, data, loss=None, epochs=2, begin=None, accumulate=1, mix=None):
        optimizer = task.configure_optimizers()
        batches = list(zip(*(part.split(8) for part in data), strict=True))
        task.train()
        for epoch in range(epochs):
            if begin is not None:
                begin(epoch)
            for i, (x, y) in enumerate(batches):
                if mix is not None:
                    x, y = mix(epoch, i, x, y)
                output = task(x)
                value = F.cross_entropy(output, y) if loss is None else loss(output, x, y)
                (value / accumulate).backward()
                if (i + 1) % accumulate == 0 or i + 1 == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()

    return run


@pytest.fixture
def assert_same():
    """Two modules have the same state."""

    def check(left, right, tolerance=1e-6):
        torch.testing.assert_close(dict(left.state_dict()), dict(right.state_dict()), rtol=0, atol=tolerance)

    return check
