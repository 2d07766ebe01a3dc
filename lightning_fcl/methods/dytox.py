"""DyTox: a task is learnt with a token and a head of its own, past tasks are rehearsed, distilled and told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.base import Pattern
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.episodic import (
    Episodic,
    add_task_memory,
    balanced_indices,
    check_memory_size,
    has_task,
    past_samples,
)
from lightning_fcl.methods.functional import require_sample_loss
from lightning_fcl.methods.method import add_seen_classes, mask_other_classes
from lightning_fcl.models.lifelong_vit import DyTox
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import above, at_least, validated


@dataclass(eq=False)
class DyToxMethod(Episodic):
    """Every step: trains `DyTox` on a new task, its token and its head (Douillard et al. 2022, sections 3.3 and 4.1).

    ``(1 - a) * task loss + a * distillation + divergence * divergence loss``, from the second task of a client on:

    - The tokens and heads of all tasks but the present one are frozen. Body, decoder, and the task's token and heads
      learn.
    - Remembered samples of past tasks join the batches, each once per local epoch. See `GEM` for which are kept.
    - The teacher is the client's own model after the last round of its previous task that it trained in. It is
      distilled over the classes of all the client's past tasks.
    - The present task's divergence head tells its classes apart, and from all others: one class for all samples of
      past tasks.
    - Balanced tuning: in the last epochs of a task the body is frozen, too, and the task's token and heads learn from
      equally many remembered samples of each class of all tasks, with the task's loss alone. With a
      `FederatedStream` these are further local epochs of the task's last round; otherwise, the task's last epochs.
      (In the authors' code old tokens and heads are tuned, too, at a tenth of the learning rate.)

    A client's task is the model's block of classes that its labels are of, see `DyTox.blocks`; what blocks a
    `FederatedStream` tells, the model takes. Token and heads travel as all other parameters do; the divergence heads,
    which serve training alone, may stay at home: ``reductions={"model.divergence.*": "local"}``. The loss of a task is
    the module's, cross-entropy for `Classifier` (the authors' is binary).

    Args:
        memory_size: Samples kept of each task: an int is their number, a float a share of the client's data in a round;
            0: none, and no balanced tuning.
        distillation_weight: Weight of the distillation; ``"auto"``: that of the past classes among all that the client
            knows, where the task's loss has the rest, as in the paper. A number leaves the task's loss as it is.
        temperature: Softens teacher and student, above 0; the distillation is scaled by its square.
        divergence_weight: Weight of the divergence loss, at least 0.
        balanced_epochs: Epochs of balanced tuning, at the end of each task but the first (the paper: 20, after 500).

    Raises:
        ValueError: If the module holds no `DyTox`, or the stream's experiences are not tasks of the model.

    Example:
        >>> DyToxMethod(memory_size=0.1, distillation_weight="auto").divergence_weight
        0.1
    """

    memory_size: int | float = 0.1
    distillation_weight: float | Literal["auto"] = "auto"
    temperature: float = validated(1.0, above, 0)
    divergence_weight: float = validated(0.1, at_least, 0)
    balanced_epochs: int = validated(1, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_size:
            check_memory_size(memory_size=self.memory_size)
        if isinstance(self.distillation_weight, str) and self.distillation_weight != "auto":
            raise InvalidValueError(
                f'Expected `distillation_weight` to be "auto" or a number but got "{self.distillation_weight}".',
                argument="distillation_weight",
            )
        at_least(0, distillation_weight=0 if isinstance(self.distillation_weight, str) else self.distillation_weight)
        self._present: int | None = None  # the task whose parameters alone learn; None: all learn
        self._tuning = False
        self._pool: tuple[Tensor, Tensor] | None = None  # what tuning is on
        self._drawn = 0
        self._embedded: Tensor | None = None
        self._tap: RemovableHandle | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model, stream = get_dytox(pl_module), find_stream(trainer)
        if stream is not None and not stream.plan.common_tasks:
            raise InvalidValueError(
                "Expected a stream that tells tasks of classes, the same for all clients, for `DyToxMethod` but got "
                f"{stream}.",
                hint='Use `scenario="fedvit"`, or "class-incremental" without `order_per_client`.',
                argument="scenario",
                value=stream.scenario,
            )
        if stream is not None:
            model.assign_classes(stream.plan.common_tasks)
        self._tap = model.decoder.register_forward_hook(self._see)

    def restore_module(self, module: L.LightningModule) -> None:
        if self._tap is not None:
            self._tap.remove()
        self._tap = self._embedded = self._pool = None

    def _see(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the task's loss has seen, so that the divergence needs no second pass; not the teacher's."""
        if module.training and torch.is_grad_enabled() and self._embedded is None:
            self._embedded = output

    # The stages of a task: all of it learns, then its token and heads are tuned.

    def local_epochs(self, client: Client) -> int | None:
        further = client.is_active and self._tunes(client.client_round) and _is_planned(client)
        return _usual_epochs(client) + self.balanced_epochs if further else None

    def _tunes(self, client_round: ClientRound) -> bool:
        return (
            bool(self.memory_size and self.balanced_epochs)
            and client_round.is_last_round
            and client_round.experience_idx > 0
        )

    def start_client(self, client: Client) -> None:
        self._present, self._pool, self._drawn = None, None, 0
        if len(client.client_round.labels):
            self._enter(client, client.client_round.labels)

    def _enter(self, client: Client, labels: Tensor) -> None:
        model = get_dytox(client.module)
        if client.is_active:
            self._present = _task_of(model, labels, client.client_round.client_id)
        model.learnt[torch.unique(model.task_index(labels))] = 1.0

    def begin_step(self, client: Client) -> None:
        batch, self._embedded = client.batch, None
        if client.federation is None and self._present is None:
            self._enter(client, batch[1])  # there is no stream, which tells labels beforehand
        self._tuning = self._is_tuning(client)
        if not self._tuning:
            return
        x, y = self._pool = self._pool or self._balanced(client)
        rows = (torch.arange(len(batch[1])) + self._drawn) % len(y)
        self._drawn += len(rows)
        batch[:] = x[rows.to(x.device)].to(batch[0]), y[rows.to(y.device)].to(batch[1])

    def _is_tuning(self, client: Client) -> bool:
        if _is_planned(client):
            return self._tunes(client.client_round) and client.local_epoch >= _usual_epochs(client)
        if not (self.memory_size and self.balanced_epochs and client.client_round.experience_idx):
            return False
        trainer = client.module.trainer
        remaining_epochs = (trainer.max_epochs or 0) - trainer.current_epoch
        return 0 < remaining_epochs <= self.balanced_epochs

    def _balanced(self, client: Client) -> tuple[Tensor, Tensor]:
        """Equally many remembered samples of each class, the present task's among them."""
        memory, client_round, stream = client.method_state, client.client_round, find_stream(client.module.trainer)
        generator = torch.Generator().manual_seed(
            derive_seed(client.seed, client_round.client_id, client_round.round_idx, "balanced")
        )
        if stream is not None:
            data = stream.client_samples(client_round.client_id, client_round.round_idx, client.seed)
            memory = add_task_memory(client, data, self.memory_size, generator)
        elif not has_task(memory, client_round.experience_idx):
            raise MissingValueError(
                f"Expected more epochs for a task than `balanced_epochs`={self.balanced_epochs} but got no more: none "
                "is left to learn it.",
                hint="Raise `max_epochs`.",
                argument="balanced_epochs",
                value=self.balanced_epochs,
            )
        indices = balanced_indices(memory["y"].cpu(), generator).to(memory["y"].device)
        return memory["x"][indices], memory["y"][indices]

    def trainable_patterns(self, client: Client) -> Pattern | None:
        task = self._present
        if task is None:
            return None
        module_name = next(name for name, part in client.module.named_modules() if isinstance(part, DyTox))
        task_patterns = (f"tokens.{task}", f"heads.{task}.*", f"divergence.{task}.*", "decoder.*", "learnt")
        learns = task_patterns if self._tuning else (*task_patterns, "body.*")
        return (f"!{module_name}.*", *(f"{module_name}.{pattern}" for pattern in learns))

    # What it makes of past tasks.

    def replay_samples(self, client: Client) -> tuple[Tensor, Tensor] | None:
        tunes_alone = self._tuning and not _is_planned(client)  # on a batch that `begin_step` has replaced
        return None if tunes_alone else past_samples(client)

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self._tuning or self._present is None or "old" not in client.method_state:
            return 0.0
        assert step.y is not None  # as it needs labels
        model, y = get_dytox(client.module), step.y
        classes = torch.arange(len(model.position), device=model.position.device)
        present = model.task_index(classes) == self._present
        old = client.method_state["old"].to(present.device) & ~present
        if not old.any():
            return 0.0  # the only past task has come back
        total: Tensor | float = 0.0
        if self.distillation_weight:
            teacher = mask_other_classes(
                step.teacher_forward(strip_prefix(client.method_state, "teacher"), step.x), old
            )
            loss = self.temperature**2 * distillation_loss(
                mask_other_classes(step.output, old), teacher, self.temperature
            )
            share: Tensor | float = old.sum() / (old | present).sum()
            if isinstance(self.distillation_weight, str):
                loss = loss - require_sample_loss(client.module).sample_loss(step.output, y)
            else:
                share = float(self.distillation_weight)
            total = share * step.mean(loss)
        if self.divergence_weight:
            assert self._embedded is not None  # a step has come through the decoder
            logits = model.divergence[self._present](self._embedded[:, self._present])
            targets = torch.where(present[y], model.position[y] - sum(model.sizes[: self._present]) + 1, 0)
            total = total + self.divergence_weight * step.mean(F.cross_entropy(logits, targets, reduction="none"))
        return total

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return super().update_client_state(client, trained_state, data) if self.memory_size else client.method_state

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory, client_round, model = client.method_state, client.client_round, get_dytox(client.module)
        block = torch.tensor(model.blocks[_task_of(model, client_round.labels, client_round.client_id)])
        old = memory.get("old", torch.zeros(len(model.position), dtype=torch.bool))
        memory = {**memory, "old": add_seen_classes(old, block.to(old.device))}
        return memory | with_prefix(trained_state, "teacher") if self.distillation_weight else memory


def get_dytox(module: L.LightningModule) -> DyTox:
    """The `DyTox` that a module trains."""
    models = [part for part in module.modules() if isinstance(part, DyTox)]
    if len(models) != 1:
        raise InvalidValueError(
            f"Expected one `DyTox` in the module for `DyToxMethod` but got {len(models)}.",
            hint="Use `Classifier(model=DyTox(...))`.",
            argument="model",
            value=len(models),
        )
    return models[0]


def _is_planned(client: Client) -> bool:
    """Return whether the local epochs of a client are planned. Those of a loader of the user are not."""
    return find_stream(client.module.trainer) is not None


def _usual_epochs(client: Client) -> int:
    return client.federation.settings.local_epochs if client.federation is not None else 1


def _task_of(model: DyTox, labels: Tensor, client: str) -> int:
    tasks = torch.unique(model.task_index(labels)).tolist()
    if len(tasks) != 1:
        raise InvalidValueError(
            f"Expected an experience of classes of one task of `DyTox` but client {client} has those of the tasks "
            f"{', '.join(map(str, tasks)) or 'none'}.",
            hint="Give `DyTox(tasks=...)` the classes of each experience.",
            argument="tasks",
            value=tasks,
        )
    return int(tasks[0])
