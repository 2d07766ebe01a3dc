"""Tests of modules with their own `training_step`: vectorized training equals sequential and hand-written training."""

import copy

import lightning.pytorch as L
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel
from raising import raises
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import EWC, GLFC, MAS, DERpp, FedNTD, FedProx, FLwF2T, LwF, Replay
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidStateError
from lightning_fcl.federation.obstacles import Obstacle, Reason
from lightning_fcl.local_training.vmap_training_step import StepTrainer

pytestmark = pytest.mark.rounding

SIZES = np.arange(4, 27)
OWNER = np.repeat(SIZES, SIZES)


def inputs(*shape):
    return np.random.default_rng(0).normal(size=(len(OWNER), *shape)).astype(np.float32)


def stream_of(x=None, y=None, batch_size=10, rounds=2, scenario=None, **options):
    """Return a stream of 23 clients with 4 to 26 samples each."""
    x, y = inputs(6) if x is None else x, np.arange(len(OWNER)) % 4 if y is None else y
    options = {"split": Split(test=0.0), "batch_size": batch_size, "seed": 0, **options}
    return FederatedStream.from_arrays(x, y, OWNER, scenario=scenario or ClassIncremental(1, rounds), **options)


def difference(left, right):
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


class Own(L.LightningModule):
    """A small network. Subclasses override its loss or its training step."""

    def __init__(self, *between):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 4))
        self.prepare()

    def prepare(self):
        """Add layers or state. Subclasses override this hook."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Frozen(Own):
    def prepare(self):
        self.net[0].weight.requires_grad_(False)


class Tied(Own):
    def prepare(self):
        self.again = nn.Linear(6, 8)
        self.again.weight = self.net[0].weight

    def forward(self, x):
        return self.net(x) + self.net[2](self.again(x))


class Counts(Own):
    """A module that scales the loss by epoch and batch index, returns a dict, and counts labels in a buffer."""

    def prepare(self):
        self.register_buffer("seen", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += F.one_hot(y, 4).sum(dim=0)
        loss = self.loss(x, y) * (1 + self.current_epoch) / (1 + batch_idx)
        return {"loss": loss + 0.001 * self.seen.sum() * self.net[0].bias.sum(), "extra": "a value for hooks"}


class Teaches(Own):
    """A module with a frozen teacher, which is a moving average of the network and part of the module's state."""

    def prepare(self):
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, x, y):
        with torch.no_grad():
            for own, theirs in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                theirs.mul_(0.9).add_(0.1 * own)
        return super().loss(x, y) + F.mse_loss(self(x), self.teacher(x).detach())


class Remembers(Own):
    """A module with a training step without `batch_idx`, and an optimizer with momentum and weight decay."""

    def training_step(self, batch):
        return self.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Ends(Own):
    def training_step(self, batch, batch_idx):
        return self.loss(*batch) if batch_idx < 4 else None


MODULES = {
    "plain": Own,
    "batch norm": lambda: Own(nn.BatchNorm1d(8)),
    "group norm": lambda: Own(nn.GroupNorm(2, 8)),
    "dropout": lambda: Own(nn.Dropout(0.3), nn.AlphaDropout(0.2)),
    "frozen": Frozen,
    "tied": Tied,
    "counting buffer": Counts,
    "moving-average teacher": Teaches,
    "momentum": Remembers,
    "no loss for later batches": Ends,
}


@pytest.fixture
def both(fit):
    """Return a function that fits a module once for each of `sizes`, and returns lists of states and logged values."""

    def run(make, stream=stream_of, methods=tuple, sizes=(1, "auto"), expected=True, **options):
        states, logs = [], []
        for size in sizes:
            task = make()
            trainer = fit(task, stream(), [*methods()], max_vectorized_clients=size, **{"seed": 0, **options})
            strategy = trainer.strategy
            beside = expected and size != 1
            assert (strategy.num_vectorized_clients > 1) == beside == (strategy.sequential_reason is None)
            assert isinstance(strategy.federation.local_trainer, StepTrainer) == beside
            states.append({name: value.clone() for name, value in task.state_dict().items()})
            logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        return states, logs

    return run


@pytest.mark.may(
    "A custom `training_step` with any batches and losses, also with batch normalization or dropout",
    "[Clients train vectorized](#vectorized-training) if a trial gives the same result.",
)
@pytest.mark.parametrize("kind", MODULES)
def test_custom_module_vectorized_equals_sequential(both, kind):
    # Drop the last batch for batch normalization, which cannot train on a batch of one sample.
    options = {"drop_last": kind == "batch norm"}
    (one, many, some), _ = both(MODULES[kind], lambda: stream_of(**options), sizes=(1, "auto", 5), local_epochs=2)
    assert difference(one, many) < 1e-5 and difference(one, some) < 1e-5
    assert difference(one, MODULES[kind]().state_dict()) > 1e-3


class Measures(Own):
    """A module that updates and logs torchmetrics objects. The confusion matrix skips the first batch."""

    def prepare(self):
        self.accuracy, self.losses = MulticlassAccuracy(4), MeanMetric()
        self.scores = MetricCollection([MulticlassF1Score(4), MulticlassAccuracy(4)], prefix="train/")
        self.confusion = MulticlassConfusionMatrix(4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.accuracy(output, y)
        self.scores(preds=output.argmax(dim=1), target=y)
        self.losses.update(loss)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log("losses", self.losses, on_step=False, on_epoch=True)
        if batch_idx > 0:
            self.confusion.update(output, y)
        return loss


@pytest.mark.may(
    "torchmetrics objects that the step updates and logs",
    "The batches of all clients update the metrics, in vectorized training as in sequential training.",
)
def test_metrics_updated_in_step_vectorized_equal_sequential(both):
    modules = []

    def make():
        modules.append(Measures())
        return modules[-1]

    states, (logs, others) = both(make)
    assert difference(*states) < 1e-5
    assert {"accuracy", "losses", "train/MulticlassAccuracy", "train/MulticlassF1Score"} <= logs.keys()
    assert logs == pytest.approx(others, rel=1e-5)
    assert (
        torch.equal(modules[0].confusion.confmat, modules[1].confusion.confmat) and modules[0].confusion.confmat.any()
    )


@pytest.mark.parametrize("change", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_trainer_arguments_vectorized_equal_sequential(both, change):
    (one, many), _ = both(MODULES["momentum"], trainer_args=change)
    (plain,), _ = both(MODULES["momentum"], sizes=("auto",))
    assert difference(one, many) < 1e-5 and difference(plain, many) > 1e-4


def by_hand(module, stream, rounds):
    """Return the server state after FedAvg rounds in which each client takes one step on all of its samples."""
    stream.setup("fit")
    server = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(rounds):
        sums, total = {name: torch.zeros_like(value, dtype=torch.double) for name, value in server.items()}, 0
        for rows in stream.plan.train[0].values():
            local = copy.deepcopy(module)
            local.load_state_dict(server)
            optimizer = local.configure_optimizers()
            local.loss(*stream.get_samples(rows)).backward()
            optimizer.step()
            sums = {name: sums[name] + len(rows) * value.double() for name, value in local.state_dict().items()}
            total += len(rows)
        server = {name: (sums[name] / total).to(value.dtype) for name, value in server.items()}
    return server


@pytest.mark.parametrize("kind", ["plain", "batch norm", "group norm", "frozen", "tied"])
def test_two_rounds_equal_hand_written_fedavg(both, kind):
    (many,), _ = both(MODULES[kind], lambda: stream_of(batch_size=30), sizes=("auto",))
    assert difference(by_hand(MODULES[kind](), stream_of(batch_size=30), 2), many) < 1e-6


class Logs(Own):
    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        losses = F.cross_entropy(output, y, reduction="none")
        self.log("loss", losses.mean(), prog_bar=True, on_epoch=True)
        self.log("weighted", losses.max(), on_step=False, on_epoch=True, batch_size=3)
        for name in ("sum", "max", "min"):
            self.log(name, losses.mean(), on_step=False, on_epoch=True, reduce_fx=name)
        right = (output.argmax(dim=1) == y).sum()
        self.log_dict({"right": right, "batch": batch_idx, "samples": len(y)}, False, None, False, True, torch.sum)
        self.log("twice", losses.min(), on_step=False, on_epoch=True)
        self.log("twice", losses.max(), on_step=False, on_epoch=True)
        self.log("step", losses.mean())
        return losses.mean()


@pytest.mark.may(
    "Numbers logged in `training_step`",
    "The value logged for a round is the same in vectorized and in sequential training.",
)
def test_values_logged_for_a_round_vectorized_equal_sequential(both):
    _, (one, many, some) = both(Logs, sizes=(1, "auto", 5))
    assert one.keys() == many.keys() == some.keys()
    # "step" and "loss_step" have the value of the clients that train last, so they may differ.
    for name in one.keys() - {"step", "loss_step"}:
        assert one[name] == pytest.approx(many[name], rel=1e-5) and one[name] == pytest.approx(some[name], rel=1e-5)
    assert one["samples"] == len(OWNER) and one["loss"] == one["loss_epoch"]


METHODS = {
    "FedProx": lambda: [FedProx(0.5)],
    "EWC": lambda: [EWC(5.0)],
    "MAS": lambda: [MAS(0.5, clients=["0", "2"])],
    "LwF": lambda: [LwF(2.0)],
    "FLwF-2T": lambda: [FLwF2T(0.3, 0.3)],
    "Replay": lambda: [Replay(9, "class-balanced", "round")],
    "DER++": lambda: [DERpp(9, 0.5, 0.5, batch_size=4)],
    "FedNTD": lambda: [FedNTD(2.0)],
    "GLFC": lambda: [GLFC(0.5)],
}


class Stated(Own):
    """A module that defines `sample_loss`, which some methods need, and a separate training step."""

    lightning_fcl_protocols = True

    def sample_loss(self, output, y):
        return F.cross_entropy(output, y, reduction="none")


@pytest.mark.seconds
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("methods", METHODS)
def test_methods_vectorized_equal_sequential(both, make_stream, methods, drops):
    def stream():
        return make_stream(partition="dirichlet", num_clients=7, rounds_per_experience=2)

    def make():
        return Stated(nn.Dropout(0.2) if drops else nn.GroupNorm(2, 8))

    (one, many), _ = both(make, stream, METHODS[methods])
    (without,), _ = both(make, stream, sizes=("auto",))
    assert difference(one, many) < 1e-5 and difference(without, many) > 1e-4


def test_method_needing_outputs_without_forward_in_step_raises(fit, make_stream):
    class Passes(Stated):
        def loss(self, x, y):
            return F.cross_entropy(self.net(x), y)

    for size in (1, "auto"):
        with raises(InvalidStateError, "output"):
            fit(Passes(), make_stream(), [LwF(2.0)], max_vectorized_clients=size)


# Tests of modules from Lightning, PyTorch and timm.


class Boring(BoringModel):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Inputs(torch.utils.data.Dataset):
    """A dataset of inputs without labels."""

    def __init__(self):
        self.x = torch.from_numpy(inputs(32))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


class Tokens(Inputs):
    """A dataset of sentences of 3 to 8 words. Each sample is a dict."""

    def __getitem__(self, index):
        words = torch.arange(index % 6 + 3) * (index + 1) % 20
        return {"input": {"words": words + 1}, "label": index % 4}


def padded(items):
    """Return a batch of sentences, padded to the longest sentence of the batch."""
    words = nn.utils.rnn.pad_sequence([item["input"]["words"] for item in items], batch_first=True)
    return {"input": {"words": words, "mask": words == 0}, "labels": torch.tensor([item["label"] for item in items])}


class Reads(L.LightningModule):
    """A classifier of sentences with the transformer encoder of PyTorch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(22, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        # Vectorized training draws other random numbers for the dropout in attention, so this dropout is 0.
        layer.self_attn.dropout = 0.0
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        words, mask = batch["input"]["words"], batch["input"]["mask"]
        hidden = self.encoder(self.words(words), src_key_padding_mask=mask)
        loss = F.cross_entropy(self.head(hidden[:, 0]), batch["labels"], label_smoothing=0.1)
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(words))
        return {"loss": loss}

    def configure_optimizers(self):
        # Adam would amplify rounding differences to whole steps.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Regresses(Own):
    def loss(self, x, y):
        return F.huber_loss(self(x).mean(dim=1), y)


class Labels(Own):
    def loss(self, x, y):
        return F.binary_cross_entropy_with_logits(self(x), y, pos_weight=torch.arange(1.0, 5.0))


class Timm(Own):
    def prepare(self):
        self.net = timm.create_model("test_resnet", num_classes=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seeded(make):
    torch.manual_seed(0)
    return make()


def of_items(data, **options):
    made = FederatedStream.from_arrays(
        data, None if isinstance(data, Tokens) else np.zeros(len(OWNER), int), OWNER, scenario=Stationary(2),
        split=Split(test=0.0), batch_size=10, seed=0, **options,
    )  # fmt: skip
    made.setup("fit")
    return made


STRANGERS = {
    "Lightning's boring model": (Boring, lambda: of_items(Inputs())),
    "Lightning's demo model": (DemoModel, lambda: of_items(Inputs())),
    "sentences as dicts": (Reads, lambda: of_items(Tokens(), collate_fn=padded)),
    "regression": (Regresses, lambda: stream_of(y=inputs(), scenario=Stationary(2))),
    "several labels": (Labels, lambda: stream_of(y=(inputs(4) > 0).astype(np.float32), scenario=Stationary(2))),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_third_party_modules_vectorized_equal_sequential(both, name):
    make, stream = STRANGERS[name]
    (one, many), (logs, others) = both(lambda: seeded(make), stream)
    assert difference(one, many) < 1e-5 and difference(one, seeded(make).state_dict()) > 1e-4
    assert logs == pytest.approx(others, rel=1e-5)


@pytest.mark.seconds
def test_timm_network_vectorized_equals_sequential(both):
    (one, many), _ = both(
        lambda: seeded(Timm), lambda: stream_of(inputs(3, 16, 16), batch_size=4, drop_last=True, rounds=1),
        sizes=(1, 3), max_epochs=1,
    )  # fmt: skip
    # Batch normalization over four samples amplifies rounding differences.
    start = dict(seeded(Timm).named_parameters())
    assert 10 * difference(one, many) < difference(start, one)
    assert int(many["net.bn1.num_batches_tracked"]) > 0


def test_large_module_trains_sequentially(fit):
    trainer = fit(seeded(Timm), stream_of(inputs(3, 16, 16), batch_size=4, drop_last=True), max_epochs=0)
    assert trainer.strategy.num_vectorized_clients == 1
    assert trainer.strategy.sequential_reason.reason is Reason.PARAMETERS
    for module, size, reason in ((Own(), 1, Obstacle(Reason.COHORT_SIZE)), (Own(), "auto", None)):
        strategy = fit(module, stream_of(), max_vectorized_clients=size, max_epochs=1).strategy
        assert strategy.sequential_reason == reason and (strategy.num_vectorized_clients > 1) == (size == "auto")


def test_resumed_vectorized_fit_is_bitwise_identical(fit, tmp_path):
    def make():
        return Own(nn.BatchNorm1d(8), nn.Dropout(0.3))

    whole, cut, rest = make(), make(), make()
    words = {"batch_size": 30}
    fit(whole, stream_of(**words), seed=0)
    saving = {"trainer_args": {"enable_checkpointing": True}, "seed": 0}
    fit(cut, stream_of(**words), [ModelCheckpoint(tmp_path, "last")], max_epochs=1, **saving)
    trainer = fit(rest, stream_of(**words), ckpt_path=tmp_path / "last.ckpt", seed=0)
    assert trainer.strategy.num_vectorized_clients > 1
    assert difference(whole.state_dict(), rest.state_dict()) == 0 < difference(whole.state_dict(), cut.state_dict())
