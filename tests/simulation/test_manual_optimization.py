"""Tests of manual optimization with several optimizers. By default, each client starts from their initial state."""

import copy

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import FedProx
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError

OWNERS = np.array(["a", "b"])[np.arange(48) % 2]
X = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)


def stream_of(clients, rounds=1):
    """Return a stream with three batches of eight samples per client. The samples do not depend on other clients."""
    y, chosen = np.arange(48) // 2 % 4, np.isin(OWNERS, list(clients))
    words = {"scenario": ClassIncremental(1, rounds), "split": Split(test=0.0), "batch_size": 8, "shuffle": False}
    return FederatedStream.from_arrays(X[chosen], y[chosen], OWNERS[chosen], seed=0, **words)


class GAN(L.LightningModule):
    """A generator and a discriminator, each with an optimizer and a schedule, as in Lightning's guide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        real, z = batch[0], batch[0][:, :2]
        for network, optimizer in zip((self.generator, self.discriminator), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(gan_loss(self, network, real, z))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        return gan_optimizers(self)


def gan_loss(module, network, real, z):
    fake = module.generator(z)
    if network is module.generator:
        return F.softplus(-module.discriminator(fake)).mean()
    return F.softplus(-module.discriminator(real)).mean() + F.softplus(module.discriminator(fake.detach())).mean()


def gan_optimizers(module):
    optimizers = [
        torch.optim.Adam(module.generator.parameters(), lr=0.05),
        torch.optim.SGD(module.discriminator.parameters(), lr=0.2, momentum=0.9),
    ]
    return optimizers, [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]


def by_hand(clients, rounds, keeps):
    """Return the module after FedAvg in plain PyTorch, in which each client trains from the server's weights."""
    server, kept = GAN(), {}
    for _ in range(rounds):
        trained = []
        for client in clients:
            module = copy.deepcopy(server)
            optimizers, schedules = gan_optimizers(module)
            for optimizer, state in zip(optimizers, kept.get(client, ()), strict=False):
                begun = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({**state, "param_groups": begun})
            for real in torch.from_numpy(X[client == OWNERS]).split(8):
                for network, optimizer in zip((module.generator, module.discriminator), optimizers, strict=True):
                    module.zero_grad()
                    gan_loss(module, network, real, real[:, :2]).backward()
                    optimizer.step()
                for schedule in schedules:
                    schedule.step()
            if keeps:
                kept[client] = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            trained.append(module)
        with torch.no_grad():
            for mean, *each in zip(server.parameters(), *(module.parameters() for module in trained), strict=True):
                mean.copy_(torch.stack(each).mean(0))
    return server


@pytest.mark.may(
    "Several optimizers",
    "Supported with manual optimization. Each client starts with the same state of all optimizers.",
)
@pytest.mark.parametrize("keeps", [False, True])
def test_several_optimizers_equal_a_loop_in_plain_pytorch(fit, assert_same, keeps):
    module = GAN()
    trainer = fit(module, stream_of("ab", rounds=2), keep_optimizer_state=keeps)
    assert_same(module, by_hand("ab", 2, keeps), 1e-6)
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers] == [0.05, 0.2]
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_optimizer_attributes_are_restored_for_each_client(fit):
    class Counting(torch.optim.SGD):
        """Counts its steps in an attribute."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.steps = [0]

        def step(self, closure=None):
            self.steps[0] += 1
            return super().step(closure)

    class Counts(GAN):
        seen = ()

        def configure_optimizers(self):
            return [Counting(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]

        def lr_schedulers(self):
            return []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            Counts.seen += (tuple(optimizer.steps[0] for optimizer in self.trainer.optimizers),)

    fit(Counts(), stream_of("ab"))
    # The federation has already restored the attributes when hooks at the end of a client's last batch run.
    assert Counts.seen[:2] == Counts.seen[3:5] == ((1, 1), (2, 2))


def test_several_optimizers_with_automatic_optimization_raise(fit):
    module = GAN()
    module.automatic_optimization = True
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        fit(module, stream_of("ab"))


def test_method_that_changes_step_with_several_optimizers_raises(fit):
    with raises(InvalidValueError, "configure_optimizers", value="FedProx"):
        fit(GAN(), stream_of("ab"), [FedProx(0.1)])
