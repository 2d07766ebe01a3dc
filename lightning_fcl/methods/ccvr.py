"""CCVR and HGP: the head is calibrated on features drawn from a Gaussian of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import above, argument, at_least, one_of
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.methods.client import Client, Server, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.fed3r import last_layer
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.prototypes import SumOfSome, class_sums, no_sums
from lightning_fcl.models.ridge import packed, square

_BATCH = 64  # samples of a step


@dataclass(eq=False)
class CCVR(Method):
    """Every experience: its last round ends with a head trained on drawn features (Luo et al. 2021; HGP, Salami 2024).

    In the last round of an experience a client sends, for each class of its samples, their number, the sum of their
    features by its own model, and that of the features' products. The server adds them up over clients, which gives the
    exact mean and covariance of all clients' features of a class (CCVR), and over experiences, as HGP keeps
    the Gaussians of all tasks. Then it draws ``samples`` features of each class from its Gaussian and trains the
    module's last layer on them, by SGD with momentum 0.9 and a cosine schedule. Where features stay, of a frozen body,
    the moments are those of all samples so far; elsewhere those of earlier experiences are of earlier features.

    HGP draws from each client's Gaussian; here a class has one. The loss is the cross-entropy among the classes that
    have come, of `decoupled_logits` where ``logit_norm`` is given, as HGP's is with 0.1.

    Args:
        covariance: ``"full"``, or ``"diagonal"``: a client then sends as many numbers as features for it.
        samples: Drawn for each class, at least 1.
        epochs: Passes over them, at least 1.
        learning_rate: At the start of each calibration, above 0.
        logit_norm: Above 0; None: logits are left as they are.

    Raises:
        ValueError: If an argument is out of range, the Trainer is no federation's, or the module tells no features.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> state = CCVR().server_state(Classifier(MLP([6, 5, 4]), num_classes=4))
        >>> {name: tuple(value.shape) for name, value in state.items()}
        {'sums': (4, 6), 'products': (4, 15), 'task': (4,)}
    """

    needs: ClassVar[Needs] = Needs(samples=True, federation="no server adds up. Use the strategy")
    reductions: ClassVar[Rules] = {"sums": SumOfSome(), "products": SumOfSome(), "task": "fixed"}

    covariance: Literal["full", "diagonal"] = argument("full", one_of, ("full", "diagonal"))
    samples: int = argument(256, at_least, 1)
    epochs: int = argument(5, at_least, 1)
    learning_rate: float = argument(0.01, above, 0)
    logit_norm: float | None = argument(None, above, 0)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last_layer(pl_module)

    def server_state(self, module: L.LightningModule) -> State:
        sums = no_sums(module).double()
        size = sums.shape[1] - 1
        numbers = size * (size + 1) // 2 if self.covariance == "full" else size
        task = sums.new_zeros(len(sums), dtype=torch.long)  # the calibration for which a class has come, from 1
        return {"sums": sums, "products": sums.new_zeros(len(sums), numbers), "task": task}

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        if not client.part.last_round:
            return {}
        x, y = finite_pairs(data)
        features = embeddings(client.module, own, x).double()
        products = torch.zeros_like(client.shared["products"])
        for label in torch.unique(y).tolist():
            of = features[(y == label).to(features.device)]
            products[label] = packed(of.T @ of) if self.covariance == "full" else of.square().sum(dim=0)
        return {"sums": class_sums(client.module, features, y), "products": products}

    def server_turn(self, server: Server) -> State:
        kept, generator, names = server.kept, server.generator, last_layer(server.module)
        if kept["sums"].equal(section(server.begun, self.section)["sums"]):
            return {}
        has = kept["sums"][:, 0] > 0
        kept["task"] = torch.where(has & (kept["task"] == 0), kept["task"].max() + 1, kept["task"])
        layer, known = [server.state[name] for name in names], has.nonzero()[:, 0]
        moments = [gaussian(kept["sums"][label].cpu(), kept["products"][label].cpu()) for label in known]
        x = torch.cat([draw_gaussian(*each, self.samples, generator) for each in moments]).to(layer[0])
        y = torch.arange(len(known)).repeat_interleave(self.samples).to(x.device)
        weight, bias = (p.detach()[known].clone().requires_grad_() for p in layer)
        orders = [torch.randperm(len(y), generator=generator) for _ in range(self.epochs)]
        batches = [chosen for order in orders for chosen in torch.split(order, _BATCH)]
        optimizer = torch.optim.SGD([weight, bias], lr=self.learning_rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
        for chosen in batches:
            with torch.enable_grad():
                logits = F.linear(x[chosen], weight, bias)
                if self.logit_norm is not None:
                    logits = decoupled_logits(logits, kept["task"][known], self.logit_norm)
                loss = F.cross_entropy(logits, y[chosen])
            weight.grad, bias.grad = torch.autograd.grad(loss, [weight, bias])
            optimizer.step()
            schedule.step()
        learnt = [p.index_copy(0, known, value) for p, value in zip(layer, (weight, bias), strict=True)]
        return dict(zip(names, learnt, strict=True))


def decoupled_logits(logits: Tensor, task: Tensor, logit_norm: float) -> Tensor:
    """Logits divided by ``logit_norm`` times the mean, over tasks, of the norms of a task's (Zhang et al. 2023: SLCA).

    How large a class's weights are then makes no difference. ``task`` has the task of each class, shape (classes,).

    Example:
        >>> logits, task = torch.tensor([[3.0, 4.0, 1.0]]), torch.tensor([1, 1, 2])
        >>> decoupled_logits(logits, task, logit_norm=1.0)
        tensor([[1.0000, 1.3333, 0.3333]])
    """
    norms = torch.stack([logits[:, task == number].norm(dim=1) for number in torch.unique(task)])
    return logits / (logit_norm * norms.mean(dim=0).clamp(min=1e-7))[:, None]


def gaussian(sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, shape (d,), and the covariance, shape (d, d), or its diagonal, shape (d,), of the samples of a class.

    Of their number and the sum of their features, shape (1 + d,), and that of the packed products, or of the squares.
    """
    count, total = sums[0], sums[1:]
    mean, size = total / count, len(total)
    if len(products) == size:
        return mean, (products - total * mean) / (count - 1).clamp(min=1)
    return mean, (square(products, size) - torch.outer(total, mean)) / (count - 1).clamp(min=1)


def draw_gaussian(mean: Tensor, covariance: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Samples of a Gaussian, shape (number, d), whose covariance, or its diagonal, may be singular."""
    noise = torch.randn(number, len(mean), dtype=mean.dtype, generator=generator)
    if covariance.dim() == 1:
        return mean + noise * covariance.clamp(min=0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    spread: Tensor = vectors * values.clamp(min=0).sqrt()
    return mean + noise @ spread.T
