"""Heads computed by the server from sums of features: CCVR and HGP (class Gaussians), Fed3R (ridge regression)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.context import Client, Server, strip_prefix, with_prefix
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import embeddings, head_of
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.prototypes import SparseSum, class_sums, zero_class_sums
from lightning_fcl.models.ridge import accumulate, pack_upper, solve, unpack_upper
from lightning_fcl.validation import above, at_least, one_of, validated


@dataclass(eq=False)
class Fed3R(Method):
    """Fed3R: sets the classifier to the ridge regression solution on all samples so far (Fanì et al., 2024).

    A client also uploads ``A = Y^T S`` and ``B = S^T S`` of the samples that it has not trained on before. S contains
    the samples' features, computed with the client's model after local training, and a column of ones for the bias. Y
    contains the one-hot classes. The server adds the sums to all earlier sums. If the stream has a base session, the
    server's sums start with the samples of the base session. Then the server computes ``W = A (B + beta I)^-1``. It
    divides the weights and the bias of each class by the norm of the class's weights. The module's last layer is set to
    the result, divided by ``temperature``. Without the division by the norms, a class with few samples would rarely be
    predicted, because ridge regression gives it small weights. Local training continues from this layer (the authors'
    Fed3R+FT). If a client misses a synchronization, it uploads the sums with its next upload.

    With a frozen body, W equals ridge regression on the pooled samples of all clients, for any partition. During
    local training, frozen batch normalization layers use the server's statistics. In the paper, the body is
    frozen while clients compute the sums.

    Args:
        beta: Regularization strength, at least 0.
        temperature: Divisor of the normalized solution, above 0. The divisor does not change the predicted classes. It
            sets the scale of the outputs from which local training continues.

    Raises:
        ValueError: If an argument is out of range, the Trainer does not use ``strategy="federated"``, or the stream's
            ``history`` is not ``"round"``. Also if the module has no linear last layer on top of its features.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> state = Fed3R(beta=1.0).init_server_state(Classifier(MLP([6, 5, 4]), num_classes=4))
        >>> {name: tuple(value.shape) for name, value in state.items()}
        {'A': (4, 6), 'B': (21,)}
    """

    citations: ClassVar[tuple[str, ...]] = ("fani2024fed3r",)

    needs: ClassVar[Needs] = Needs(
        round_samples=True,
        features=True,
        tensors=True,
        federation_reason="it has no server that adds up sums. Use the strategy, with a single client if necessary",
    )
    reductions: ClassVar[ReductionRules] = {"A": SparseSum(), "B": SparseSum()}

    beta: float = validated(1.0, at_least, 0)
    temperature: float = validated(0.1, above, 0)
    # A and B of the samples of the stream's base session.
    _base: State = field(default_factory=dict, init=False, repr=False)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last_layer(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._base, stream = {}, find_stream(trainer)
        if stream is None or trainer.ckpt_path is not None:
            return
        if stream.plan.history != "round":
            raise InvalidValueError(
                f'Expected a scenario with `history="round"` for `Fed3R`, but got "{stream.plan.history}", which would '
                "count samples twice.",
                hint="Leave `history` out of the scenario's arguments.",
                argument="history",
                value=stream.plan.history,
            )
        if len(stream.plan.base_samples):
            self._base = self._sums(pl_module, state_tensors(pl_module), stream.get_samples(stream.plan.base_samples))

    def init_server_state(self, module: L.LightningModule) -> State:
        return {**_no_sums(module), **self._base}

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        sums, earlier = (
            self._sums(client.module, trained_state, client.new_samples(data)),
            strip_prefix(client.method_state, "unsent"),
        )
        return {name: value + earlier[name].to(value.device) for name, value in sums.items()} if earlier else sums

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return with_prefix(self.upload_statistics(client, trained_state, data), "unsent") if client.missed_sync else {}

    def process_aggregate(self, server: Server) -> State:
        sums, (weight, bias) = server.server_state, last_layer(server.module)
        # The last element of B is the number of samples. If it has not changed, no client uploaded new samples.
        if sums["B"][-1] == strip_prefix(server.previous_state, self.section_name)["B"][-1]:
            return {}
        solution = solve(sums["A"], unpack_upper(sums["B"], sums["A"].shape[1]), self.beta)
        norms = solution[:, :-1].norm(dim=1, keepdim=True)
        # Classes without samples have the norm 0.
        solution = solution / (norms.where(norms > 0, 1e-6) * self.temperature)
        return {weight: solution[:, :-1], bias: solution[:, -1]}

    @staticmethod
    def _sums(module: L.LightningModule, state: State, data: Batch) -> State:
        x, y = finite_pairs(data)
        features, sums = embeddings(module, state, x), _no_sums(module)
        targets = F.one_hot(y.to(features.device), len(sums["A"]))
        accumulate(sums["A"], sums["B"], F.pad(features, (0, 1), value=1.0), targets)
        return sums


def _no_sums(module: L.LightningModule) -> State:
    a = zero_class_sums(module).double()
    size = a.shape[1]
    return {"A": a, "B": a.new_zeros(size * (size + 1) // 2)}


def last_layer(module: L.LightningModule) -> tuple[str, str]:
    """Return the names of the weight and the bias of the last layer, or raise ValueError if there is no such layer.

    The last layer maps the module's features to its classes.
    """
    if (layer := head_of(module)) is not None:
        names = {id(value): name for name, value in state_tensors(module).items()}
        return names[id(layer.weight)], names[id(layer.bias)]
    raise InvalidValueError(
        "Expected a module whose last layer is an `nn.Linear` with a bias that maps `features` inputs to `num_classes` "
        f"outputs, but this `{type(module).__name__}` has no such layer.",
        hint="Use a `Classifier` with such a network.",
        argument="module",
        value=type(module).__name__,
    )


# Number of feature vectors in each batch of the calibration.
_BATCH = 64


@dataclass(eq=False)
class CCVR(Method):
    """CCVR: a head that the server trains on features drawn from class Gaussians (Luo et al., 2021).

    For each experience, a client uploads three statistics per class: the number of samples, the sum of their feature
    vectors, and the sum of the products of their features. The features are computed with the client's own model. See
    `MethodBase.contribute_experience`.

    The server adds up the statistics over clients. This gives the exact mean and covariance of all clients' features of
    a class (CCVR). The server also adds up the statistics over experiences, as in HGP (Salami et al., 2024). The
    Gaussians thus cover all tasks.

    In the last round of each experience, the server draws ``num_samples`` feature vectors of each class from the
    class's Gaussian. It trains the module's last layer on these vectors, by SGD with momentum 0.9 and a cosine
    schedule. If the body is frozen, the mean and the covariance are exact for all samples so far. Otherwise, the
    statistics of earlier experiences belong to features of earlier models.

    HGP draws from one Gaussian per client and class. This implementation draws from one Gaussian per class. HGP draws
    new feature vectors in each epoch, in batches of 256. Here they are drawn once, and a batch has 64 vectors. The loss
    is the cross-entropy among the classes seen so far. With ``logit_norm``, the cross-entropy is computed on the result
    of `decoupled_logits`. HGP uses ``logit_norm=0.1``.

    Args:
        covariance: ``"full"`` or ``"diagonal"``. With ``"diagonal"``, a client uploads only one number per feature for
            the covariance of a class.
        num_samples: Number of feature vectors drawn for each class, at least 1.
        epochs: Number of passes over the drawn feature vectors, at least 1.
        lr: Learning rate at the start of each calibration, above 0.
        logit_norm: Factor in `decoupled_logits`, above 0. None: logits are not normalized.

    Raises:
        ValueError: If an argument is out of range, the Trainer does not use ``strategy="federated"``, or the module has
            no linear last layer on top of its features.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> state = CCVR().init_server_state(Classifier(MLP([6, 5, 4]), num_classes=4))
        >>> {name: tuple(value.shape) for name, value in state.items()}
        {'sums': (4, 6), 'products': (4, 15), 'task': (4,)}
    """

    citations: ClassVar[tuple[str, ...]] = ("luo2021ccvr",)

    needs: ClassVar[Needs] = Needs(
        round_samples=True,
        features=True,
        tensors=True,
        federation_reason="it has no server that adds up sums. Use the strategy",
    )
    reductions: ClassVar[ReductionRules] = {"sums": SparseSum(), "products": SparseSum(), "task": "constant"}

    covariance: Literal["full", "diagonal"] = validated("full", one_of, ("full", "diagonal"))
    num_samples: int = validated(256, at_least, 1)
    epochs: int = validated(5, at_least, 1)
    lr: float = validated(0.01, above, 0)
    logit_norm: float | None = validated(None, above, 0)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last_layer(pl_module)

    def init_server_state(self, module: L.LightningModule) -> State:
        sums = zero_class_sums(module).double()
        size = sums.shape[1] - 1
        numbers = size * (size + 1) // 2 if self.covariance == "full" else size
        # For each class: the number (from 1) of the calibration in which the class first appeared, or 0 before that.
        task = sums.new_zeros(len(sums), dtype=torch.long)
        return {"sums": sums, "products": sums.new_zeros(len(sums), numbers), "task": task}

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        x, y = finite_pairs(data)
        features = embeddings(client.module, trained_state, x).double()
        products = torch.zeros_like(client.server_state["products"])
        for label in torch.unique(y).tolist():
            class_features = features[(y == label).to(features.device)]
            products[label] = (
                pack_upper(class_features.T @ class_features)
                if self.covariance == "full"
                else class_features.square().sum(dim=0)
            )
        return {"sums": class_sums(client.module, features, y), "products": products}

    def process_aggregate(self, server: Server) -> State:
        server_state, generator, names = server.server_state, server.generator, last_layer(server.module)
        has = server_state["sums"][:, 0] > 0
        if not (server.ends and has.any()):
            return {}
        server_state["task"] = torch.where(
            has & (server_state["task"] == 0), server_state["task"].max() + 1, server_state["task"]
        )
        layer, seen_classes = [server.state[name] for name in names], has.nonzero()[:, 0]
        moments = [
            gaussian(server_state["sums"][label].cpu(), server_state["products"][label].cpu()) for label in seen_classes
        ]
        x = torch.cat([draw_gaussian(*each, self.num_samples, generator) for each in moments]).to(layer[0])
        y = torch.arange(len(seen_classes)).repeat_interleave(self.num_samples).to(x.device)
        weight, bias = (p.detach()[seen_classes].clone().requires_grad_() for p in layer)
        orders = [torch.randperm(len(y), generator=generator) for _ in range(self.epochs)]
        batches = [rows for order in orders for rows in torch.split(order, _BATCH)]
        optimizer = torch.optim.SGD([weight, bias], lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
        for rows in batches:
            with torch.enable_grad():
                logits = F.linear(x[rows], weight, bias)
                if self.logit_norm is not None:
                    logits = decoupled_logits(logits, server_state["task"][seen_classes], self.logit_norm)
                loss = F.cross_entropy(logits, y[rows])
            weight.grad, bias.grad = torch.autograd.grad(loss, [weight, bias])
            optimizer.step()
            schedule.step()
        learnt = [p.index_copy(0, seen_classes, value) for p, value in zip(layer, (weight, bias), strict=True)]
        return dict(zip(names, learnt, strict=True))


def decoupled_logits(logits: Tensor, task: Tensor, logit_norm: float) -> Tensor:
    """Return logits divided by ``logit_norm`` times their norm (SLCA: Zhang et al., 2023).

    The norm of a sample is computed over the logits of each task, and averaged over the tasks. The result does not
    change if all logits of a sample are multiplied by the same positive number.

    Args:
        logits: Logits, shape (batch, classes).
        task: Task of each class, shape (classes,).
        logit_norm: Factor, above 0.

    Example:
        >>> logits, task = torch.tensor([[3.0, 4.0, 1.0]]), torch.tensor([1, 1, 2])
        >>> decoupled_logits(logits, task, logit_norm=1.0)
        tensor([[1.0000, 1.3333, 0.3333]])
    """
    norms = torch.stack([logits[:, task == number].norm(dim=1) for number in torch.unique(task)])
    return logits / (logit_norm * norms.mean(dim=0).clamp(min=1e-7))[:, None]


def gaussian(sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the covariance of the features of a class.

    Args:
        sums: Number of samples and sum of their features, shape (1 + d,).
        products: Sum of the packed products of the features, shape (d * (d + 1) / 2,), or sum of squares, shape (d,).

    Returns:
        The mean, shape (d,), and the covariance, shape (d, d). If ``products`` is a sum of squares, the diagonal of the
        covariance, shape (d,), is returned in place of the covariance.
    """
    count, total = sums[0], sums[1:]
    mean, size = total / count, len(total)
    if len(products) == size:
        return mean, (products - total * mean) / (count - 1).clamp(min=1)
    return mean, (unpack_upper(products, size) - torch.outer(total, mean)) / (count - 1).clamp(min=1)


def draw_gaussian(mean: Tensor, covariance: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Return random samples of a Gaussian, shape (number, d). ``covariance`` is a matrix or its diagonal.

    The covariance may be singular.
    """
    noise = torch.randn(number, len(mean), dtype=mean.dtype, generator=generator)
    if covariance.dim() == 1:
        return mean + noise * covariance.clamp(min=0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    spread: Tensor = vectors * values.clamp(min=0).sqrt()
    return mean + noise @ spread.T
