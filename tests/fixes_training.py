"""Table of hints in the error messages of local training, methods and stored networks."""

import lightning.pytorch as L
import torch
from fixes import (
    Plain,
    Row,
    fit_one_round,
    fit_reservoir,
    has_rounds,
    sgd,
    small_stream,
)
from fixes_models import Net, save_network
from torch import nn

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import DyToxMethod, RegMean, Replay, Unlearning
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidStateError, MissingValueError
from lightning_fcl.methods.method import Method
from lightning_fcl.models import MLP, DyTox
from lightning_fcl.models.backbone import frozen_backbone

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


class Samples(Classifier):
    """A module that sets `grad_sample` of each parameter, as libraries for per-sample gradients do."""

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad_sample = parameter.grad[None]


def fit_samples(lab, batch_size=8, **options):
    stream = small_stream(batch_size=batch_size)
    return fit_one_round(lab, stream, Samples(MLP([6, 5, 4]), 4, sgd), trainer_args=options)


def uneven_stream():
    """Return a stream of two clients whose last batches have 4 and 8 samples."""
    x, y, client = torch.randn(44, 6), torch.arange(44) % 4, (torch.arange(44) >= 20).long()
    return small_stream(x=x, y=y, client_ids=client, batch_size=8, split=Split(test=0.0))


class NoLoss(Plain):
    """A module that returns no loss for batches of 4 samples after the first batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx and len(batch[0]) == 4 else loss


class OtherParameters(Plain):
    """A module that trains only its second layer on batches of 4 samples after the first batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx and len(x) == 4:
            return nn.functional.cross_entropy(self.model[3](x[:, :5].detach()), y)
        return super().training_step(batch, batch_idx)


class SingleSamples(Classifier):
    """A module whose training step fails before the first round, so that the library cannot run a batch in advance."""

    def training_step(self, batch, batch_idx):
        if self.trainer.strategy.current_round is None:
            raise ValueError("not yet")
        return super().training_step(batch, batch_idx)


class Remembers(Method):
    """A method that stores a state entry only for client "1". With `fills`, all clients have the entry."""

    vectorizable = True

    def __init__(self, fills=False, together=True):
        super().__init__()
        self.fills, self.vectorizable = fills, together

    def prepare_client_state(self, client):
        return {"seen": torch.zeros(1), **client.method_state} if self.fills else client.method_state

    def update_client_state(self, client, trained_state, data):
        return {"seen": torch.ones(1)} if client.client_round.client_id == "1" else client.method_state

    def penalty(self, client, step):
        return 0.0 * client.method_state["seen"].sum() if "seen" in client.method_state else 0.0


class AsksPart(Method):
    """A method whose penalty reads the round from `client.client_round` or, with `stores`, from the method state."""

    vectorizable = True

    def __init__(self, stores=False, together=True):
        super().__init__()
        self.stores, self.vectorizable = stores, together

    def prepare_client_state(self, client):
        return {"round": torch.tensor(float(client.client_round.round_idx))} if self.stores else client.method_state

    def penalty(self, client, step):
        if self.stores:
            return 0.0 * client.method_state["round"]
        return 0.0 * client.client_round.round_idx if client.module.trainer.current_epoch else 0.0


def fit_with_method(lab, make, **options):
    return has_rounds(lab.fit(lab.task(), lab.stream(), [make(**options)]), 2)


def learn_two_tasks(lab, epochs):
    model = DyTox(2, 4, image_size=8, patch_size=4, width=8, depth=1, num_heads=2)
    task, method = Classifier(model, 4, sgd), DyToxMethod(8, balanced_epochs=1)
    for first, number in ((0, 2), (2, epochs)):
        x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 2 + first
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        trainer = L.Trainer(max_epochs=number, callbacks=[method], **lab.quiet)
        trainer.fit(task, loader)
    has_rounds(trainer)


class Scales(nn.Module):
    """A network with a parameter and without a linear layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (x * self.weight)[:, :4]


def fit_flips(lab, transform):
    return has_rounds(lab.fit(lab.task(), lab.stream(), [Replay(8, transform=transform)]), 2)


def flip_image(x):
    return x.flip(2)


def forget(lab, requests):
    """Fit with unlearning requests. Client 1 has only classes of the second experience."""
    y = torch.arange(48) % 4
    stream = FederatedStream.from_arrays(
        torch.randn(48, 9, 3), y, y // 2, scenario=ClassIncremental(2, class_order=[0, 1, 2, 3]), split=Split(test=0.0)
    )
    return fit_reservoir(lab, stream=lambda: stream, callbacks=[Unlearning(requests)])


def embed_images(lab, images):
    network = frozen_backbone("lcnet_035", save_network(lab, "lcnet_035"))
    assert network.embed(images).isfinite().all()


BYTES = torch.randint(256, (1, 3, 32, 32))


def load_task(lab, **options):
    path = lab.folder / "task.ckpt"
    trainer = L.Trainer(max_epochs=1, **lab.quiet)
    task = Classifier(Net(), 4)
    trainer.fit(task, datamodule=lab.stream(num_clients=1))
    trainer.save_checkpoint(path)
    loaded = Classifier.load_from_checkpoint(path, **options)
    assert torch.equal(loaded.model.head.weight, task.model.head.weight)


COHORT = "Set `max_vectorized_clients=1`."

ROWS |= {
    "gradients of samples with accumulated batches": Row(
        fit_samples,
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 1, "batch_size": 16},
        "Remove `accumulate_grad_batches`, and use a larger `batch_size`.",
    ),
    "step without a loss for some clients": Row(
        lambda lab, size: fit_one_round(lab, uneven_stream(), NoLoss(), max_vectorized_clients=size),
        {"size": 2},
        {"size": 1},
        COHORT,
    ),
    "step that trains other parameters for some clients": Row(
        lambda lab, size: fit_one_round(lab, uneven_stream(), OtherParameters(), max_vectorized_clients=size),
        {"size": 2},
        {"size": 1},
        COHORT,
    ),
    "method with a state entry for some clients": Row(
        fit_with_method,
        {"make": Remembers},
        {"fills": True},
        "Return entries with the same names and shapes in `prepare_client_state`, or set `vectorizable = False`.",
    ),
    "method with a state entry for some clients, sequential": Row(
        fit_with_method,
        {"make": Remembers},
        {"together": False},
        "Return entries with the same names and shapes in `prepare_client_state`, or set `vectorizable = False`.",
    ),
    "method that reads the round in its penalty": Row(
        fit_with_method,
        {"make": AsksPart},
        {"stores": True},
        "Store the values for the step in the state that `prepare_client_state` returns, or set "
        "`vectorizable = False`.",
        InvalidStateError,
    ),
    "method that reads the round in its penalty, sequential": Row(
        fit_with_method,
        {"make": AsksPart},
        {"together": False},
        "Store the values for the step in the state that `prepare_client_state` returns, or set "
        "`vectorizable = False`.",
        InvalidStateError,
    ),
    "DyTox with only balanced epochs": Row(
        learn_two_tasks, {"epochs": 1}, {"epochs": 2}, "Raise `max_epochs`.", MissingValueError
    ),
    "RegMean of a network without linear layers": Row(
        lambda lab, model: fit_one_round(lab, task=lab.task(model=model), callbacks=[RegMean()]),
        {"model": Scales()},
        {"model": nn.Sequential(nn.Linear(6, 6), Scales())},
        "Add a trainable `nn.Linear` with the reduction `mean`, or use another method.",
    ),
    "transform of replay samples of another shape": Row(
        fit_flips,
        {"transform": flip_image},
        {"transform": lambda x: x.flip(0)},
        "Use a transform that accepts samples as the dataset returns them.",
    ),
    "request of a client without data": Row(
        forget,
        {"requests": {"0": 1, "1": 0}},
        {"requests": {"0": 1, "1": 1}},
        "Use a later round for this client, or leave the client out of `requests`.",
    ),
    "request of a client without data, removed": Row(
        forget,
        {"requests": {"0": 1, "1": 0}},
        {"requests": {"0": 1}},
        "Use a later round for this client, or leave the client out of `requests`.",
    ),
    "images of uint8 for a backbone": Row(
        embed_images,
        {"images": BYTES},
        {"images": BYTES / 255},
        "Pass a batch of images with 1 or 3 channels. Divide bytes by 255. Load a dataset with "
        '`normalize="none"`, because the backbone normalizes images.',
    ),
    "checkpoint of a task with an own network": Row(load_task, {}, {"model": Net()}, "Pass the object as `model=...`."),
}
