"""GLFC: class-aware loss weights, and distillation from the server's model of an earlier experience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.accumulators import Accumulator, GatheringAccumulator, nonzero_rows
from lightning_fcl.federation.aggregation import ReductionRules, State, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import require_federation
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.methods.context import Client, Server, Step, strip_prefix, with_prefix
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import embeddings, evaluation_mode, predictions, select_tensors, to_input
from lightning_fcl.methods.method import Method, class_mask, match_output, sample_shape, target_mask
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.teachers import (
    Once,
    models_before,
    old_classes,
    present_experiences,
    with_teacher,
    without_teacher,
)
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import at_least, between, validated

# Number and learning rate of the gradient steps that perturb the sample of a class before its gradient is uploaded.
_STEPS, _RATE = 50, 0.2


class ConcatNonzeroRows(Reduction):
    """A reduction that concatenates the nonzero rows of all clients' uploads."""

    name = "concat_nonzero_rows"
    is_downloaded = False

    def initial_value(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def pack(self, value: Tensor) -> Tensor:
        return nonzero_rows(value)

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        """Return the packed rows, followed by rows of zeros up to the length of ``reference``."""
        if (
            packed.dtype != reference.dtype
            or packed.dim() != reference.dim()
            or packed.shape[1:] != reference.shape[1:]
        ):
            return super().unpack(packed, reference)
        return torch.cat([packed, reference.new_zeros(max(0, len(reference) - len(packed)), *reference.shape[1:])])

    def make_accumulator(self) -> Accumulator:
        return GatheringAccumulator(
            lambda rows_by_name, server: {name: torch.cat(rows) for name, rows in rows_by_name.items()}, nonzero_rows
        )


def make_encoder(size: Sequence[int], classes: int, seed: int) -> nn.Sequential:
    """Return the network whose gradients clients upload: a LeNet with sigmoids for images, otherwise a linear layer.

    The weights are uniform in [-0.5, 0.5], and identical for the same seed.

    Args:
        size: Shape of one sample. A sample with three dimensions (channels, height, width) is an image.
        classes: Number of classes.
        seed: Seed of the weights.

    Example:
        >>> make_encoder((3, 32, 32), 10, seed=0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    if len(size) == 3:
        for channels, stride in ((size[0], 2), (12, 2), (12, 1)):
            layers += [nn.Conv2d(channels, 12, 5, stride, padding=2), nn.Sigmoid()]
    body = nn.Sequential(*layers, nn.Flatten())
    encoder = nn.Sequential(*body, nn.Linear(body(torch.zeros(1, *size)).shape[1], classes))
    generator = torch.Generator().manual_seed(seed)
    for parameter in encoder.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return encoder


@torch.enable_grad()
def input_gradient(encoder: nn.Module, x: Tensor, label: int, create_graph: bool = False) -> Tensor:
    """Return the gradient of one sample's cross-entropy with respect to all parameters, as one vector.

    ``label`` is the class of the sample.
    """
    loss = F.cross_entropy(encoder(x), torch.tensor([label], device=x.device))
    pieces = torch.autograd.grad(loss, [*encoder.parameters()], create_graph=create_graph)
    return torch.cat([piece.flatten() for piece in pieces])


def invert(encoder: nn.Module, gradient: Tensor, label: int, start: Tensor, iterations: int = 250) -> Tensor:
    """Return a sample whose `input_gradient` is nearest to ``gradient``, found by L-BFGS (Zhu et al., 2019).

    If the network is a linear layer, the gradient determines the unknown sample x. The gradient is then ``g x^T`` for
    the weight and g for the bias, where g is the gradient of the loss with respect to the output.

    Args:
        encoder: The network.
        gradient: Gradient of the unknown sample as one vector.
        label: Class of the unknown sample.
        start: Initial value of the sample, shape (1, ...).
        iterations: Maximum number of L-BFGS iterations.

    Example:
        >>> linear, x = nn.Sequential(nn.Linear(2, 3)), torch.tensor([[0.5, -2.0]])
        >>> invert(linear, input_gradient(linear, x, 1), 1, torch.zeros(1, 2)).round(decimals=3)
        tensor([[ 0.5000, -2.0000]])
    """
    x, size = start.clone().requires_grad_(), gradient.square().sum().clamp(min=1e-30)
    optimizer = torch.optim.LBFGS([x], max_iter=iterations, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        distance = (input_gradient(encoder, x, label, create_graph=True) - gradient).square().sum() / size
        (x.grad,) = torch.autograd.grad(distance, x)
        return distance

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return x.detach()


def class_aware_weights(logits: Tensor, y: Tensor, old: Tensor, share: Tensor | None = None) -> Tensor:
    """Return GLFC's loss weight of each sample: ``g / mean g`` with ``g = 1 - sigmoid(z_y)``, shape (batch,).

    z_y is the logit of the sample's class. The mean of g is computed separately over samples of old and of new classes.

    Args:
        logits: Logits z, shape (batch, classes).
        y: Labels, shape (batch,).
        old: Mask of old classes, shape (classes,).
        share: Weight of each sample for the mean of g, shape (batch,). None: equal weights.

    Example:
        >>> class_aware_weights(Tensor([[0, 0], [0, 0], [9, 0]]), torch.tensor([0, 1, 1]), torch.tensor([True, False]))
        tensor([1., 1., 1.])
    """
    pace = torch.sigmoid(-logits.detach().gather(1, y[:, None])[:, 0])
    share, of_old = torch.ones_like(pace) if share is None else share, old[y]
    old_mean, new_mean = (
        (pace * share * group).sum() / (share * group).sum().clamp(min=1e-12) for group in (of_old, ~of_old)
    )
    return pace / torch.where(of_old, old_mean, new_mean).clamp(min=1e-12)


@dataclass(eq=False)
class GLFC(Method):
    """GLFC: global-local forgetting compensation with class-aware weights and distillation (Dong et al., 2022).

    The task loss is replaced by ``(1 - strength) * mean w BCE(z, y) + strength * mean BCE(z, t)``. z are the module's
    logits. BCE is the binary cross-entropy with a sigmoid, averaged over the classes that any client has received so
    far. The weights w are `class_aware_weights`. The target t is the label y, but with the teacher's prediction for old
    classes. If there are no old classes, only the first term is used, without the factor. Old classes are the classes
    of all earlier experiences of the stream. Streams whose experiences are not defined by classes have no old classes,
    and BCE is then averaged over all classes.

    The teacher is the server's model from before the first client entered the newest experience. See
    `lightning_fcl.methods.teachers`. A client downloads the teacher once in each experience except the first. For
    exemplars, add `Replay` to the callbacks. The paper's detection of new tasks by entropy is not implemented.
    Deviation: in the first task, the authors' code sets all weights w to 1. Here, the first task also has
    `class_aware_weights`, whose mean over a batch is 1.

    With ``proxy_server``, the teacher is the best of the server's models in the previous experience. In its first round
    of an experience, a client selects one sample of each of its classes: the sample whose features are nearest to the
    mean of the class. The client perturbs the sample by 50 gradient steps that decrease the loss of the client's model.
    Then the client uploads the gradient of this sample for a small network (`make_encoder`). This network is the same
    for all clients. The server reconstructs the samples (`invert`). The best model classifies the largest number of the
    experience's reconstructed samples correctly. **A client thus reveals one slightly perturbed sample of each of its
    classes** to the server, and to anyone else who can read the upload.

    Args:
        strength: Weight of the distillation, 0 to 1. 0 uses only the class-aware weights.
        proxy_server: Whether the server chooses the teacher with reconstructed samples of clients.
        num_iterations: Maximum number of L-BFGS iterations per reconstructed sample, at least 1.

    Raises:
        ValueError: If an argument is out of range, or the module does not output class logits. With ``proxy_server``,
            also if the Trainer does not use ``strategy="federated"`` or the module has no features.
        TypeError: If the batches are not pairs.

    Example:
        >>> GLFC(strength=0.5).task_weight(Client())
        0.0
    """

    citations: ClassVar[tuple[str, ...]] = ("dong2022glfc",)

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)
    reductions: ClassVar[ReductionRules] = {
        "gradients": ConcatNonzeroRows(),
        "before.*": Once(),
        **dict.fromkeys(("best.*", "images", "labels", "latest"), "constant"),
    }
    of_experience: ClassVar[tuple[str, ...]] = ("teacher.*", "told")

    strength: float = validated(0.5, between, 0, 1)
    proxy_server: bool = False
    num_iterations: int = validated(250, at_least, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.proxy_server:
            vars(self)["reductions"] = {"before.*": Once()}
        else:
            # The hooks read the samples of a round only with `proxy_server`.
            vars(self)["needs"] = replace(self.needs, round_samples=True, tensors=True)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.proxy_server:
            federation = require_federation(
                trainer, "GLFC(proxy_server=True)", "it has no server that chooses a teacher"
            )
            self._size, self._classes = (
                sample_shape(federation, "GLFC(proxy_server=True)"),
                federation.stream.num_classes,
            )
            draws = derive_seed(federation.seed, self.section_name, "encoder")
            self._encoder = make_encoder(self._size, self._classes, draws).to(pl_module.device)

    def init_server_state(self, module: L.LightningModule) -> State:
        distils = self.strength > 0 and old_classes(module)
        teacher = models_before(module, present_experiences(module, 0)[-1:]) if distils else {}
        if not self.proxy_server:
            return teacher
        numbers = nn.utils.parameters_to_vector(self._encoder.parameters())
        rows, images = numbers.new_zeros(self._classes, 2 + len(numbers)), numbers.new_zeros(0, *self._size)
        # The first two columns of a row are the experience, counted from 1, and the class. The gradient follows.
        proxy_state = {
            "gradients": rows,
            "images": images,
            "labels": numbers.new_zeros(0),
            "latest": numbers.new_zeros(()),
        }
        return proxy_state | with_prefix(state_tensors(module), "best") | teacher

    def prepare_client_state(self, client: Client) -> StateSection:
        client_round, numbers = (
            client.client_round,
            [int(name.split(".")[0]) for name in strip_prefix(client.server_state, "before")],
        )
        memory = with_teacher(client, max(numbers, default=0)) if self.strength > 0 else client.method_state
        classes_by_name = {"old": client_round.old_classes, "seen": client_round.old_classes + client_round.new_classes}
        return {
            **memory,
            **{name: class_mask(client_round.num_classes, classes) for name, classes in classes_by_name.items()},
        }

    def task_weight(self, client: Client) -> float:
        return 0.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        # `needs` requires labels.
        assert step.y is not None
        z, y = step.output, step.y
        old, seen_mask = (match_output(client.method_state[name], z) for name in ("old", "seen"))
        seen_mask = seen_mask | ~seen_mask.any()

        def entropy(target: Tensor) -> Tensor:
            class_losses = F.binary_cross_entropy_with_logits(z, target, reduction="none")
            return (class_losses * seen_mask).sum(dim=1) / seen_mask.sum()

        target = target_mask(y, z).to(z)
        loss = step.mean(class_aware_weights(z, y, old, step.sample_weight) * entropy(target))
        if self.strength == 0:
            return loss
        teacher_output = step.teacher_forward(
            {**step.received_state, **strip_prefix(client.method_state, "teacher")}, step.x
        ).sigmoid()
        share = self.strength * old.any()
        return (1 - share) * loss + share * step.mean(entropy(torch.where(old, teacher_output, target)))

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        if not self.proxy_server or "told" in client.method_state:
            return {}
        x, y = finite_pairs(data)
        features, gradients = (
            F.normalize(embeddings(client.module, trained_state, x)),
            torch.zeros_like(client.server_state["gradients"]),
        )
        for label in torch.unique(y).tolist():
            class_rows = (y == label).to(features.device)
            nearest = (features[class_rows] - features[class_rows].mean(dim=0)).norm(dim=1).argmin()
            prototype = perturbed(
                client.module, trained_state, x[class_rows.to(x.device)][nearest : nearest + 1], label
            )
            marks = gradients.new_tensor([client.client_round.experience_idx + 1, label])
            gradients[label] = torch.cat([marks, input_gradient(self._encoder, prototype.to(gradients), label)])
        return {"gradients": gradients}

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        upload_flag = {"told": torch.tensor(True)} if self.proxy_server and not client.missed_sync else {}
        return without_teacher(client) | upload_flag

    def process_aggregate(self, server: Server) -> State:
        if not self.proxy_server:
            return {}
        proxy_state, gradients = server.server_state, server.server_state["gradients"]
        proxy_state["gradients"] = strip_prefix(server.previous_state, self.section_name)["gradients"]
        begins = len(gradients) > 0 and bool(gradients[:, 0].max() > proxy_state["latest"])
        if begins:
            proxy_state.update(
                {
                    "latest": gradients[:, 0].max(),
                    "images": proxy_state["images"][:0],
                    "labels": proxy_state["labels"][:0],
                }
            )
        for row in gradients[gradients[:, 0] == proxy_state["latest"]]:
            noise = torch.randn(1, *self._size, generator=server.generator).to(row)
            image = invert(self._encoder, row[2:], int(row[1]), noise, self.num_iterations)
            proxy_state.update(
                {
                    "images": torch.cat([proxy_state["images"], image]),
                    "labels": torch.cat([proxy_state["labels"], row[1:2]]),
                }
            )
        if not len(proxy_state["labels"]):
            return {}
        current_score, best_score = (
            predictions(server.module, one, proxy_state["images"]).argmax(dim=1).eq(proxy_state["labels"]).sum()
            for one in (server.state, strip_prefix(proxy_state, "best"))
        )
        if begins or current_score >= best_score:
            proxy_state.update(with_prefix(server.state, "best"))
        following = present_experiences(server.module, 0, round_offset=1)[-1:]
        # If the next round starts a new experience, the best model becomes the teacher of this experience.
        if following > present_experiences(server.module, 0)[-1:]:
            proxy_state.update(models_before(server.module, following, strip_prefix(proxy_state, "best")))
        return {}


def perturbed(module: L.LightningModule, state: State, x: Tensor, label: int) -> Tensor:
    """Return a sample, shape (1, ...), after gradient steps that decrease a model's binary cross-entropy."""
    x = to_input(module, x).clone().requires_grad_()
    module_state = select_tensors(state, module)
    with evaluation_mode(module), torch.enable_grad():
        for _ in range(_STEPS):
            output = functional_call(module, module_state, (x,))
            target = F.one_hot(torch.tensor([label], device=x.device), output.shape[-1]).to(output)
            (gradient,) = torch.autograd.grad(F.binary_cross_entropy_with_logits(output, target), x)
            x = (x - _RATE * gradient).detach().requires_grad_()
    return x.detach()
