"""Replay of samples that are selected at random (DER++), by their gradients (Re-Fed) or by their leverage (FedCBDR)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.base import ReplaySamples
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix, zeros_like_state
from lightning_fcl.methods.episodic import finite_pairs, memory_pairs
from lightning_fcl.methods.functional import embeddings, predictions, require_sample_loss, trainable_parameters
from lightning_fcl.methods.method import Method, class_mask, match_output
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.per_sample_gradients import module_per_sample_gradients, over_samples, squared_norms
from lightning_fcl.methods.prototypes import SparseSum, zero_class_sums
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import above, at_least, validated


@dataclass(eq=False)
class DERpp(Method):
    """Dark experience replay, DER++ (Buzzega et al., 2020, eq. 6): replay samples and the logits stored with them.

    The loss is ``task loss + alpha * ||f(x') - z'||^2 + beta * task loss(f(x''), y'')``. f is the module. The pairs
    (x', z') and (x'', y'') are drawn from the buffer in every step, separately and with replacement. z' are the logits
    of the client's own model when x' was stored. As in the authors' code, the squared distance is a mean over samples
    and classes. ``beta=0`` is DER.

    A client keeps a uniform random choice of all samples that it has trained on (reservoir sampling). Each sample is
    offered once, after the client's first round with it, with the logits of the model that the client has just trained.
    In a plain Trainer without a `FederatedStream`, each sample is offered again in each epoch, as in the authors' code.
    The buffer may then contain a sample several times, with different logits. The samples and logits
    stay on the client. The client uploads the same tensors as in FedAvg.

    Args:
        memory_size: Maximum number of samples that a client keeps, at least 1.
        alpha: Weight of the distance from the stored logits, at least 0.
        beta: Weight of the task loss of replay samples, at least 0.
        batch_size: Number of samples in each of the two draws of a step, at least 1.

    Raises:
        ValueError: If an argument is out of range, or the module does not define ``sample_loss(output, y)``.
        TypeError: If the samples are not pairs.

    Example:
        >>> DERpp(batch_size=16).replay_batch_size
        32
    """

    citations: ClassVar[tuple[str, ...]] = ("buzzega2020derpp",)

    needs: ClassVar[Needs] = Needs(sample_loss=True, tensors=True)

    memory_size: int = validated(200, at_least, 1)
    alpha: float = validated(0.1, at_least, 0)
    beta: float = validated(0.5, at_least, 0)
    batch_size: int = validated(32, at_least, 1)

    @property
    def replay_batch_size(self) -> int:
        return 2 * self.batch_size

    def replay_samples(self, client: Client) -> ReplaySamples:
        return {name: client.method_state[name] for name in ("x", "y", "logits") if name in client.method_state}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if not step.replay_samples:
            return 0.0
        (first, second), (_, y), (logits, _) = (step.replay_samples[name].chunk(2) for name in ("x", "y", "logits"))
        output = step.forward_fn(first)
        distance = F.mse_loss(output, logits.to(output.device))
        return step.replay_weight * (self.alpha * distance + self.beta * step.loss_fn(second, y))

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        x, y = finite_pairs(client.new_samples(data))
        if not len(y):
            return client.method_state
        lots = torch.rand(len(y), generator=client.generator).to(x.device)
        new = {"x": x, "y": y, "logits": predictions(client.module, trained_state, x).to(x.device), "lot": lots}
        if client.method_state:
            new = {name: concat_nested([client.method_state[name].to(x.device), value]) for name, value in new.items()}
        indices = new["lot"].argsort(descending=True, stable=True)[: self.memory_size]
        return {name: value[indices] for name, value in new.items()}


@dataclass(eq=False)
class ReFed(Method):
    """Re-Fed (Li et al., 2024, CVPR): replay the samples with the largest gradients of a personal model.

    At the end of an experience a client computes `sample_importance` for its replay samples and the samples of the last
    round. The client keeps the ``memory_size`` samples with the largest importance. If the rounds of an experience have
    different samples, the client selects after each round, from its replay samples and the new samples of the round. To
    compute the importance, a personal model ``v`` takes gradient steps on all of these samples. Each step also moves
    ``v`` towards the model that the client received. ``v`` starts from the received model in the first experience and
    continues in later experiences. ``v`` is client-local. The client uploads the same tensors as in FedAvg.

    Deviation: in the paper the selection is done when the next experience starts, with the server's model after the
    last round. The default values are chosen by this library.

    Args:
        memory_size: Maximum number of samples that a client keeps, of all experiences together, at least 1.
        num_iterations: Number of steps of ``v``, at least 1.
        lr: Step size of ``v``, above 0.
        strength: Weight of the term that moves ``v`` towards the received model, q(lambda) in the paper, at least 0.
            With 0, ``v`` is trained on the client's samples only.

    Raises:
        ValueError: If an argument is out of range, the module does not define ``sample_loss(output, y)``, or ``v``
            diverges.
        TypeError: If the samples are not pairs.

    Example:
        >>> ReFed(memory_size=100).strength
        0.5
    """

    citations: ClassVar[tuple[str, ...]] = ("li2024refed",)

    needs: ClassVar[Needs] = Needs(round_samples=True, sample_loss=True, tensors=True)
    accumulates: ClassVar[bool] = True

    memory_size: int = validated(200, at_least, 1)
    num_iterations: int = validated(5, at_least, 1)
    lr: float = validated(0.01, above, 0)
    strength: float = validated(0.5, at_least, 0)

    def replay_samples(self, client: Client) -> tuple[Tensor, Tensor] | None:
        return memory_pairs(client.method_state)

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        x, y = finite_pairs(data)
        memory = client.result or client.method_state
        old = memory_pairs(memory) or (x[:0], y[:0])
        x, y = (concat_nested([past.to(new.device), new]) for past, new in zip(old, (x, y), strict=True))
        if not len(y):
            return memory
        previous_params = {
            name: value.to(trained_state[name].device) for name, value in strip_prefix(memory, "v").items()
        }
        importance, v = sample_importance(
            client.module,
            client.received_state,
            previous_params,
            x,
            y,
            self.num_iterations,
            self.lr,
            self.strength,
        )
        if not torch.isfinite(importance).all():
            raise InvalidValueError(
                f"Expected `lr` to keep the personal model of client {client.client_round.client_id} finite, "
                f"but got {self.lr}.",
                hint="Lower `lr`.",
                argument="lr",
                value=self.lr,
            )
        indices = importance.argsort(descending=True, stable=True)[: self.memory_size].sort().values.to(y.device)
        return {"x": x[indices], "y": y[indices], **with_prefix(v, "v")}


def sample_importance(
    module: L.LightningModule,
    received_state: Mapping[str, Tensor],
    personal: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    num_iterations: int,
    lr: float,
    strength: float,
) -> tuple[Tensor, State]:
    """Return the importance of samples for a personal model v, and the final state of v.

    The importance is ``sum_s ||g_s||^2 / s``, shape (n,). g_s is the gradient of a sample's loss at v in iteration
    s = 1, 2, ... Then v takes the step ``v - lr * (mean g_s + strength * (v - w))``, where w is the received state. The
    module is in evaluation mode. Entries that v does not have, such as buffers, are taken from w.

    Args:
        module: The module, which defines ``sample_loss(output, y)``.
        received_state: The state w that the client has received.
        personal: The initial state of v, by name. A missing entry starts from w.
        x: Inputs, shape (n, ...).
        y: Targets, shape (n, ...).
        num_iterations: Number of steps.
        lr: Step size.
        strength: Weight of the pull towards w.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> task = Classifier(MLP([2, 2]), num_classes=2)
        >>> w = {name: torch.zeros_like(value) for name, value in task.state_dict().items()}
        >>> x, y = Tensor([[0, 0], [1, 1]]), torch.tensor([0, 1])
        >>> sample_importance(task, w, {}, x, y, num_iterations=1, lr=0.1, strength=0.5)[0]
        tensor([0.5000, 1.5000])
    """
    loss = require_sample_loss(module).sample_loss
    names = [*trainable_parameters(module)]
    w = {name: received_state[name].detach() for name in module.state_dict()}
    v = {name: {**w, **personal}[name] for name in names}
    importance = w[names[0]].new_zeros(len(y))
    for iteration in range(1, num_iterations + 1):
        squares, total = [], zeros_like_state(v)
        for gradients in module_per_sample_gradients(
            module, lambda output, y: loss(output, y).sum(), {**w, **v}, x, y, names
        ):
            squares.append(torch.stack([squared_norms(of) for of in gradients.values()]).sum(dim=0))
            total = {name: total[name] + over_samples(lambda value: value, gradients[name]) for name in names}
        importance = importance + torch.cat(squares) / iteration
        v = {n: p - lr * (total[n] / len(y) + strength * (p - w[n])) for n, p in v.items()}
    return importance, v


@dataclass(eq=False)
class FedCBDR(Method):
    """FedCBDR (Qi et al., 2025): replay samples selected by their leverage among the samples of all clients.

    The leverage of a sample is ``x^T (X^T X)^+ x``. Here, x contains the features of the sample, and X contains the
    features of all clients' samples. A sample that is rare among all clients has a high leverage.

    For each experience a client uploads ``X_k^T X_k`` of its features, computed with its own model. When the experience
    ends, the client receives the sum over all clients. Then the client draws n of its samples of the experience and
    keeps these in addition to samples of earlier experiences. n is ``memory_size`` times the client's fraction of the
    total leverage, rounded. The samples are drawn without replacement, with probabilities proportional to the leverage.
    They never leave the client.

    Deviation: in the paper a client uploads ``P_k X_k Q``, with random orthogonal P_k and Q, and the server draws the
    samples. A row of ``P_k X_k Q`` is a mixture of samples, so its leverage is not the leverage of a sample. The client
    gets the leverage of its samples only if it multiplies the server's left singular vectors by ``P_k^T``. The paper's
    upload also reveals ``X_k^T X_k``, up to a rotation.

    The logits of old classes (of earlier experiences) and of all other classes are divided by different temperatures.
    The cross-entropy of a sample is multiplied by the weight of its class. If a temperature or a weight is not 1, the
    task loss must be cross-entropy. The paper uses ``old_temperature=0.9``, ``new_temperature=1.1``, ``old_weight=1.1``
    and ``new_weight=0.9``.

    Args:
        memory_size: Number of samples of an experience that all clients together keep, at least 1.
        old_temperature: Temperature of the logits of old classes, above 0.
        new_temperature: Temperature of all other logits, above 0.
        old_weight: Weight of samples of old classes, at least 0.
        new_weight: Weight of all other samples, at least 0.

    Raises:
        ValueError: If an argument is out of range, the Trainer does not run a federation, or the module does not define
            its features.

    Example:
        >>> FedCBDR(memory_size=100).memory_size
        100
    """

    citations: ClassVar[tuple[str, ...]] = ("qi2025fedcbdr",)

    needs: ClassVar[Needs] = Needs(
        round_samples=True,
        features=True,
        logits=True,
        tensors=True,
        federation_reason="it has no server that sums the clients' statistics. Use the strategy",
    )
    accumulates: ClassVar[bool] = True
    reductions: ClassVar[ReductionRules] = {"gram": SparseSum()}

    memory_size: int = validated(500, at_least, 1)
    old_temperature: float = validated(1.0, above, 0)
    new_temperature: float = validated(1.0, above, 0)
    old_weight: float = validated(1.0, at_least, 0)
    new_weight: float = validated(1.0, at_least, 0)

    def init_server_state(self, module: L.LightningModule) -> State:
        size = zero_class_sums(module).shape[1] - 1
        return {"gram": zero_class_sums(module).new_zeros(size, size, dtype=torch.float64)}

    def replay_samples(self, client: Client) -> tuple[Tensor, Tensor] | None:
        return memory_pairs(client.method_state)

    @property
    def _tells_apart(self) -> bool:
        return {self.old_temperature, self.new_temperature, self.old_weight, self.new_weight} != {1.0}

    def prepare_client_state(self, client: Client) -> StateSection:
        if not self._tells_apart:
            return client.method_state
        return {
            **client.method_state,
            "old": class_mask(client.client_round.num_classes, client.client_round.old_classes),
        }

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if not self._tells_apart or step.y is None:
            return 0.0
        old = match_output(client.method_state["old"], step.output)
        scaled = step.output / torch.where(old, self.old_temperature, self.new_temperature)
        weighted = torch.where(old[step.y], self.old_weight, self.new_weight) * _cross_entropy(scaled, step.y)
        return step.mean(weighted - _cross_entropy(step.output, step.y))

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        features = embeddings(client.module, trained_state, finite_pairs(data)[0]).double()
        return {"gram": features.T @ features}

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        if client.missed_sync or not client.is_active:
            return client.method_state
        x, y = finite_pairs(data)
        new = {"x": x, "y": y, "features": embeddings(client.module, trained_state, x)}
        earlier = strip_prefix(client.result, "new")
        new = {name: concat_nested([earlier[name], value]) if earlier else value for name, value in new.items()}
        return client.method_state | with_prefix(new, "new")

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        if federation is None or not (gram := federation.server.get_section(self.section_name)["gram"]).any():
            return
        server = federation.server
        client_rounds = [
            client_round
            for client_round in federation.ending_clients(federation.current_round.round_idx)
            if self.applies_to(client_round)
        ]
        if not client_rounds:
            return
        inverse, rank = pseudoinverse(gram)
        hosted = {client_round.client_id for client_round in client_rounds if federation.hosts(client_round.client_id)}
        memories = {client: server.client_store.get_section(client, self.section_name) for client in hosted}
        selecting_clients = {client for client, memory in memories.items() if strip_prefix(memory, "new")}
        for client in sorted(set().union(*federation.ranks.all_gather_object(selecting_clients))):
            server.send(client, {"gram": gram})
        for client_round in (
            client_round for client_round in client_rounds if client_round.client_id in selecting_clients
        ):
            memory = memories[client_round.client_id]
            new = strip_prefix(memory, "new")
            scores = leverage(new.pop("features"), inverse).cpu()
            size = min(round(self.memory_size * float(scores.sum()) / rank), len(scores))
            generator = torch.Generator().manual_seed(
                derive_seed(federation.seed, client_round.client_id, client_round.round_idx, self.section_name)
            )
            indices = scores.clamp(min=1e-9).multinomial(size, generator=generator) if size else scores[:0].long()
            exemplars = {n: concat_nested([memory.get(n, value[:0]), value[indices]]) for n, value in new.items()}
            server.client_store.set_section(client_round.client_id, self.section_name, exemplars)
        server.extra_tensors[f"{self.section_name}.gram"] = torch.zeros_like(gram)


_cross_entropy = partial(F.cross_entropy, reduction="none")


def pseudoinverse(gram: Tensor) -> tuple[Tensor, int]:
    """Return the pseudoinverse of a symmetric matrix, and the rank of the matrix, from one decomposition.

    Example:
        >>> pseudoinverse(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
        (tensor([[0.2500, 0.0000],
                [0.0000, 0.0000]]), 1)
    """
    values, vectors = torch.linalg.eigh(gram)
    # Smaller eigenvalues are rounding errors. `torch.linalg.pinv` uses the same threshold.
    is_significant = values.abs() > len(values) * torch.finfo(gram.dtype).eps * values.abs().max()
    inverse: Tensor = (vectors * torch.where(is_significant, values.reciprocal(), 0.0)) @ vectors.T
    return inverse, int(is_significant.sum())


def leverage(features: Tensor, inverse: Tensor) -> Tensor:
    """Return the leverage ``x^T G^+ x`` of samples, shape (n,).

    The sum of the leverage of all samples is the rank of G.

    Args:
        features: Features x of the samples, shape (n, d).
        inverse: The pseudoinverse G^+ of ``G = X^T X``, shape (d, d), where X are the features of all samples.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
        >>> leverage(x, torch.linalg.pinv(x.T @ x))
        tensor([0.5000, 0.5000, 1.0000], dtype=torch.float64)
    """
    wide = features.double()
    return torch.einsum("nd,de,ne->n", wide, inverse.double(), wide)
