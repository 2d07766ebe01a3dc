"""Tests of non-finite, very large, shared or missing values in a module's state: a fit works or raises an error."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn
from torchmetrics import CatMetric

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.federation.swarm import Swarm


class Base(L.LightningModule):
    """A network of two layers. Subclasses add state to the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.prepare()

    def prepare(self):
        """Add state to the module. Subclasses override this hook."""

    def training_step(self, batch, batch_idx):
        self.change(batch[0])
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def change(self, x):
        """Change the added state in a training step. Subclasses override this hook."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def near(left, right):
    torch.testing.assert_close(dict(left), {name: right[name] for name in left}, rtol=0, atol=0)


class Masked(Base):
    """A module with a causal mask, and a buffer of NaNs. Training sets one element of the buffer."""

    def prepare(self):
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("late", torch.full((2,), torch.nan))

    def change(self, x):
        assert torch.equal(self.mask, torch.full((3, 3), -torch.inf).triu(1))
        self.late[0] = 3.0


@pytest.mark.may(
    "Buffers with non-finite values, such as a causal mask",
    "The values are kept, and no upload is dropped because of them.",
)
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_non_finite_buffer_of_the_server_does_not_drop_uploads(fit, make_stream, rule):
    task, plain = Masked(), Base()
    trainer = fit(task, make_stream(), max_vectorized_clients=1, seed=0, reductions={"mask": rule, "late": rule})
    fit(plain, make_stream(), max_vectorized_clients=1, seed=0)
    near(plain.state_dict(), task.state_dict())
    assert not trainer.strategy.server.record.dropped
    assert torch.equal(task.mask, torch.full((3, 3), -torch.inf).triu(1))
    assert task.late[0] == 3.0 and task.late[1].isnan()


@pytest.mark.may("Integer buffers with values above 2^53", "The integers stay exact.")
def test_integers_beyond_double_precision_stay_exact(fit, make_stream):
    class Tagged(Base):
        def prepare(self):
            self.register_buffer("tag", torch.tensor([2**62 + 12345, 5, -(2**60) - 1]))

        def change(self, x):
            self.tag[1] += 3

    task, stream = Tagged(), make_stream(batch_size=1000)
    fit(task, stream, max_vectorized_clients=1, local_epochs=2)
    # Each client trains two steps in each of two rounds, and each step adds 3.
    assert task.tag.tolist() == [2**62 + 12345, 5 + 2 * 2 * 3, -(2**60) - 1]


@pytest.mark.may("Buffers made by `expand`", "These buffers are averaged like all other buffers.")
def test_expanded_buffers_are_averaged(fit, make_stream):
    class Expanded(Base):
        def prepare(self):
            self.register_buffer("ones", torch.ones(1).expand(4))
            self.register_buffer("others", torch.ones(1).expand(4), persistent=False)

        def change(self, x):
            self.ones = (self.ones[:1] + 1).expand(4)

    task = Expanded()
    fit(task, make_stream(batch_size=1000), max_vectorized_clients=1)
    assert task.ones.tolist() == [3.0] * 4 and task.others.tolist() == [1.0] * 4


class Adapters(Base):
    """A module whose `state_dict` contains only the last layer."""

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "model.2" in name}


@pytest.mark.may("A `state_dict` that contains only adapters", "Only the adapters are transmitted.")
def test_state_dict_of_adapters_uploads_only_adapters(fit, make_stream):
    class Frozen(Adapters):
        def prepare(self):
            self.model[0].requires_grad_(False)

    class Whole(Base):
        prepare = Frozen.prepare

    task, whole = Frozen(), Whole()
    record = fit(task, make_stream(), max_vectorized_clients=1, seed=0).strategy.server.record
    fit(whole, make_stream(), max_vectorized_clients=1, seed=0)
    near(task.state_dict(), whole.state_dict())
    assert set(record.upload_bytes.values()) == {4 * (8 * 4 + 4)}


class Lazy(Base):
    def prepare(self):
        self.more = nn.LazyLinear(4)


class Lists(Base):
    def prepare(self):
        self.kept = CatMetric()
        self.kept.persistent(True)


class Copies(Base):
    def state_dict(self, *args, **kwargs):
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


class Bare(Base):
    def state_dict(self):
        return super().state_dict()


class Late(Base):
    def change(self, x):
        self.more = nn.Linear(6, 4)


class LateBuffer(Base):
    def change(self, x):
        self.register_buffer("more", x.mean(dim=0))


@pytest.mark.may(
    "A `state_dict` that contains copies or omits trained tensors, and layers that are created in the first step",
    "Not supported. The aggregated state could not be loaded into the module.",
)
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (Lazy, "more.weight"),
        (Lists, "kept.value"),
        (Copies, "model.0.weight"),
        (Adapters, "model.0.weight"),
        (Bare, "keep_vars"),
        (Late, "more.weight"),
        (LateBuffer, "more"),
    ],
)
def test_state_that_cannot_be_exchanged_raises_with_name(fit, make_stream, make, argument):
    with raises(InvalidValueError, argument):
        fit(make(), make_stream(), max_vectorized_clients=1)


# Tests of rounds without a usable upload.


class Diverges(Callback):
    """Makes the first layer's weights of some clients infinite in the second round."""

    def __init__(self, clients):
        self.clients = clients

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if trainer.strategy.current_client_round.client_id in self.clients and trainer.current_epoch == 1:
            pl_module.model[0].weight.data.fill_(torch.inf)


@pytest.mark.may(
    "Divergence on every client",
    'The fit ends with an error that names the clients and the reason. With `on_empty_round="warn"` the fit continues.',
)
def test_round_without_usable_upload_ends_the_fit(fit, make_stream, caplog):
    task, one, warned = Base(), Base(), Base()
    with raises(InvalidValueError, "on_empty_round"):
        fit(task, make_stream(), [Diverges("012")], max_vectorized_clients=1, seed=0)
    fit(one, make_stream(), max_vectorized_clients=1, seed=0, max_epochs=1)
    fit(warned, make_stream(), [Diverges("012")], max_vectorized_clients=1, seed=0, on_empty_round="warn")
    near(one.state_dict(), task.state_dict())
    near(one.state_dict(), warned.state_dict())
    assert "No upload of this round was usable" in caplog.text
    with pytest.raises(UnknownNameError, check=lambda error: error.argument == "on_empty_round"):
        fit(Base(), make_stream(), on_empty_round="stopp")


def test_round_with_some_or_no_participants_does_not_end_the_fit(fit, make_stream):
    fit(Base(), make_stream(), [Diverges("01")], max_vectorized_clients=1)
    missed = Swarm(missed_rounds={"0": [1]}), Swarm(missed_rounds={"0": [1], "1": [1], "2": [1]})
    fit(Base(), make_stream(), [Diverges("12")], max_vectorized_clients=1, swarm=missed[0])
    fit(Base(), make_stream(), max_vectorized_clients=1, swarm=missed[1])
