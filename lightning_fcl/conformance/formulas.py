"""Statements that the methods' fits equal the papers' formulas, computed in independent loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.conformance.fixtures import CLASSES
from lightning_fcl.conformance.reference import (
    NUM_CLIENTS,
    RATE,
    ReferenceRule,
    flatten_state,
    loss_gradient,
    reference_features,
    reference_logits,
    register_reference_statement,
    task_gradient,
    unflatten,
)


@dataclass
class _Scaffold(ReferenceRule):
    def start_experience(self) -> None:
        self.memory, self._c, self._change = {}, torch.zeros(()), torch.zeros(())

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return task_gradient(w, x, y) - memory.get("c", torch.zeros(())) + self._c

    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        previous = memory.get("c", torch.zeros(()))
        memory["c"] = previous - self._c + (w_server - w) / (RATE * self.gradient_weight(steps))
        self._change = self._change + (memory["c"] - previous) / NUM_CLIENTS
        return w

    def aggregate(self, w_server: Tensor, uploads: list[Tensor]) -> Tensor:
        self._c, self._change = self._c + self._change, torch.zeros(())
        return super().aggregate(w_server, uploads)


@dataclass
class _FedDyn(ReferenceRule):
    alpha: float = 0.0

    def start_experience(self) -> None:
        self.memory, self._total = {}, torch.zeros(())

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return task_gradient(w, x, y) - memory.get("g", torch.zeros(())) + self.alpha * (w - w_server)

    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        memory["g"] = memory.get("g", torch.zeros(())) - self.alpha * (w - w_server)
        self._total = self._total + (w - w_server) / NUM_CLIENTS
        return w

    def aggregate(self, w_server: Tensor, uploads: list[Tensor]) -> Tensor:
        return super().aggregate(w_server, uploads) + self._total


@dataclass
class _FedNova(ReferenceRule):
    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        weight = self.gradient_weight(steps)
        return torch.cat([(w - w_server) / weight, torch.tensor([weight], dtype=w.dtype)])

    def aggregate(self, w_server: Tensor, uploads: list[Tensor]) -> Tensor:
        mean = torch.stack(uploads).mean(dim=0)
        return w_server + mean[-1] * mean[:-1]


@dataclass
class _Personal(ReferenceRule):
    """A loop in which each client also trains a personal model ``v``, with a velocity that is 0 in each new round."""

    def step_personal(self, memory: dict[str, Tensor], v: Tensor, gradient: Tensor) -> None:
        """Take a step of the personal model from the parameters ``v``."""
        memory["velocity"] = self.momentum * memory.get("velocity", torch.zeros(())) + gradient
        memory["v"] = v - RATE * memory["velocity"]

    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        del memory["velocity"]
        return w


@dataclass
class _Ditto(_Personal):
    strength: float = 0.0

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        v = memory.get("v", w_server)
        self.step_personal(memory, v, task_gradient(v, x, y) + self.strength * (v - w_server))
        return task_gradient(w, x, y)


@dataclass
class _Moon(ReferenceRule):
    mu: float = 0.0
    temperature: float = 1.0

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        positive, negative = (reference_features(model, x) for model in (w_server, memory.get("own", w_server)))

        def loss(value: Tensor) -> Tensor:
            features = reference_features(value, x)
            similarity, other_similarity = (
                torch.cosine_similarity(features, other) / self.temperature for other in (positive, negative)
            )
            contrast = -(similarity.exp() / (similarity.exp() + other_similarity.exp())).log()
            return F.cross_entropy(reference_logits(value, x), y) + self.mu * contrast.mean()

        return loss_gradient(loss, w)

    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        memory["own"] = w
        return w


@dataclass
class _Consolidation(ReferenceRule):
    """A loop with a quadratic penalty around the center, weighted by the importance of the parameters."""

    strength: float = 0.0
    normalize: bool = False

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if "importance" not in memory:
            return task_gradient(w, x, y)
        return task_gradient(w, x, y) + self.strength * memory["importance"] * (w - memory["center"])


@dataclass
class _Si(_Consolidation):
    damping: float = 0.1

    def start_experience(self) -> None:
        for memory in self.memory.values():
            importance = memory.pop("decrease").clamp(min=0) / (memory.pop("moved").square() + self.damping)
            memory["importance"] = memory.get("importance", torch.zeros(())) + importance
            memory["center"] = memory.pop("last")

    def after_step(self, memory: dict[str, Tensor], w_previous: Tensor, w: Tensor, x: Tensor, y: Tensor) -> None:
        change = w - w_previous
        zeros = torch.zeros_like(w)
        memory["decrease"] = memory.get("decrease", zeros) - task_gradient(w_previous, x, y) * change
        memory["moved"] = memory.get("moved", zeros) + change
        memory["last"] = w


@dataclass
class _RegMean(ReferenceRule):
    alpha: float = 1.0

    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        parameters, pieces = unflatten(w), [w]
        for layer, inputs in (("body.0", x), ("head", reference_features(w, x))):
            rows = F.pad(inputs, (0, 1), value=1.0)
            matrix = torch.cat([parameters[f"{layer}.weight"], parameters[f"{layer}.bias"][:, None]], dim=1)
            gram = rows.T @ rows
            gram = self.alpha * gram + (1 - self.alpha) * torch.diag(gram.diagonal())
            pieces += [gram.flatten(), (matrix @ gram).flatten()]
        return torch.cat(pieces)

    def aggregate(self, w_server: Tensor, uploads: list[Tensor]) -> Tensor:
        mean, parameters = torch.stack(uploads).mean(dim=0)[len(w_server) :], unflatten(w_server.clone())
        for layer in ("body.0", "head"):
            outputs, inputs = parameters[f"{layer}.weight"].shape
            size = inputs + 1
            gram, weighted, mean = torch.split(mean, [size**2, outputs * size, len(mean) - size * (size + outputs)])
            solution = torch.linalg.solve(gram.view(size, size), weighted.view(outputs, size), left=False)
            parameters[f"{layer}.weight"], parameters[f"{layer}.bias"] = solution[:, :-1], solution[:, -1]
        return flatten_state(parameters)


@dataclass
class _FedNtd(ReferenceRule):
    beta: float = 0.0
    temperature: float = 1.0

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        # Columns of the classes that are not the sample's true class.
        not_true = torch.tensor([[label for label in range(CLASSES) if label != true] for true in y.tolist()])
        teacher = (reference_logits(w_server, x).gather(1, not_true) / self.temperature).softmax(dim=1)

        def loss(value: Tensor) -> Tensor:
            logits = reference_logits(value, x)
            student = (logits.gather(1, not_true) / self.temperature).log_softmax(dim=1)
            divergence = (teacher * (teacher.log() - student)).sum(dim=1).mean()
            return F.cross_entropy(logits, y) + self.beta * self.temperature**2 * divergence

        return loss_gradient(loss, w)


@dataclass
class _Apfl(_Personal):
    alpha0: float = 0.5
    alpha_lr: float = 0.0

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        v, alpha = memory.get("v", w_server), memory.get("alpha", torch.tensor(self.alpha0).double())
        mixed_gradient = task_gradient(alpha * v + (1 - alpha) * w, x, y)
        self.step_personal(memory, v, alpha * mixed_gradient)
        memory["alpha"] = (alpha - self.alpha_lr * (v - w) @ mixed_gradient).clamp(0, 1)
        return task_gradient(w, x, y)


@dataclass
class _Ewc(_Consolidation):
    def start_experience(self) -> None:
        for memory in self.memory.values():
            if "last" in memory:
                importances = [
                    self.importance(memory["last"], x[None], y[None])
                    for x, y in zip(memory.pop("x"), memory.pop("y"), strict=True)
                ]
                memory["center"] = memory.pop("last")
                memory["importance"] = memory.get("importance", torch.zeros(())) + torch.stack(importances).mean(dim=0)

    def importance(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the importance of the parameters for one sample."""
        return task_gradient(w, x, y).square()

    def end_round(self, memory: dict[str, Tensor], w: Tensor, x: Tensor, y: Tensor) -> None:
        memory.update(last=w, x=x, y=y)


@dataclass
class _Mas(_Ewc):
    def importance(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss_gradient(lambda value: reference_logits(value, x).square().sum(), w).abs()


@dataclass
class _Lwf(ReferenceRule):
    strength: float = 0.0
    temperature: float = 1.0

    def start_experience(self) -> None:
        for memory in self.memory.values():
            memory["old"], memory["teacher"] = memory["seen"], memory["last"]

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if "old" not in memory:
            return task_gradient(w, x, y)
        old = memory["old"]
        teacher = (reference_logits(memory["teacher"], x)[:, old] / self.temperature).softmax(dim=1)

        def loss(value: Tensor) -> Tensor:
            logits = reference_logits(value, x)
            student = (logits[:, old] / self.temperature).log_softmax(dim=1)
            return F.cross_entropy(logits, y) - self.strength * (teacher * student).sum(dim=1).mean()

        return loss_gradient(loss, w)

    def end_round(self, memory: dict[str, Tensor], w: Tensor, x: Tensor, y: Tensor) -> None:
        memory.update(last=w, seen=torch.unique(torch.cat([memory.get("seen", y[:0]), y])))


register_reference_statement(
    "SCAFFOLD", "Algorithm 1 with option II, whose variates start at 0 in each task", _Scaffold
)
register_reference_statement("FedDyn", "the dynamic regularizer and the server's correction", _FedDyn, alpha=0.3)
register_reference_statement("FedNova", "changes divided by the sum of the steps' coefficients", _FedNova)
register_reference_statement(
    "Ditto",
    "FedAvg, and personal models with a proximal term",
    _Ditto,
    personal=lambda memory: memory["v"],
    strength=0.4,
)
register_reference_statement(
    "MOON", "the contrastive loss against the received and the client's last model", _Moon, mu=2.0, temperature=0.5
)
register_reference_statement(
    "SI", "the path integral of each client's own steps", _Si, strength=0.8, damping=0.1, normalize=False
)
register_reference_statement(
    "RegMean", "the least squares solution for the outputs of the clients' layers", _RegMean, alpha=0.7
)
register_reference_statement(
    "FedNTD", "the distillation of the not-true classes at temperature 3", _FedNtd, beta=0.7, temperature=3.0
)
for _alpha in (0.0, 1.0):
    register_reference_statement(
        "APFL",
        f"with alpha fixed at {_alpha:g}, the personal models are "
        + ("the first received models" if _alpha == 0 else "trained on the clients' own samples only"),
        _Apfl,
        personal=lambda memory: memory["v"],
        alpha0=_alpha,
        alpha_lr=0.0,
    )
register_reference_statement(
    "APFL",
    "the steps of the personal models and of alpha",
    _Apfl,
    personal=lambda memory: memory["v"],
    alpha0=0.5,
    alpha_lr=0.2,
)
register_reference_statement(
    "EWC",
    "a client keeps the Fisher information of its last round of each task",
    _Ewc,
    strength=3.0,
    normalize=False,
)
register_reference_statement(
    "MAS",
    "a client keeps the importance of its last round of each task",
    _Mas,
    strength=0.2,
    normalize=False,
)
register_reference_statement(
    "LwF",
    "a client keeps its model and its classes of its last round of each task",
    _Lwf,
    strength=1.5,
    temperature=2.0,
)
