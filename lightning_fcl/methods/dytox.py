"""DyTox: one token and one head per task, trained with replay, distillation and a divergence loss for past tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
    """DyTox training with a token and a head for each task (Douillard et al., 2022, sections 3.3 and 4.1).

    From a client's second task on, the loss is by default
    ``(1 - a) * task loss + a * distillation + divergence_weight * divergence loss``. The weight a is the share of past
    classes. ``distillation_weight`` can replace this weight. The parts of the method are:

    - Freezing: the tokens and heads of all other tasks are frozen. The body, the decoder, and the token and heads of
      the current task are trained.
    - Replay: samples of past tasks are added to the batches, see `MethodBase.replay_batch_size`. The samples are
      selected as in `GEM`.
    - Distillation: the teacher is the client's model after its last round of its previous task. The distillation uses
      the classes of all past tasks of the client.
    - Divergence loss: the divergence head of the current task classifies the task's classes. All samples of past tasks
      form one more class.
    - Balanced tuning: in the last epochs of each task except the first, the body is frozen, too. The decoder and the
      task's token and heads are trained with the task's loss only. The training data are stored samples of all tasks of
      the client so far, with an equal number of samples of each class. With a `FederatedStream`, the tuning has extra
      local epochs in the task's last round. Otherwise, the last epochs of the fit are for tuning. The authors' code
      also tunes old tokens and heads, with a tenth of the learning rate.

    A client's task is the model's block of classes that contains its labels, see `DyTox.blocks`. If a `FederatedStream`
    defines blocks of classes, the model uses these blocks. Stored samples and the teacher stay on the client. Tokens
    and heads are uploaded like all other parameters. Divergence heads are used in training only and can be
    client-local: ``reductions={"model.divergence.*": "local"}``. The task's loss is the loss of the module, which is
    cross-entropy for `Classifier`. The authors use binary cross-entropy.

    Args:
        memory_size: Number of stored samples per task (int), or share of the client's data in a round (float). 0: no
            samples and no balanced tuning.
        distillation_weight: Weight of the distillation. ``"auto"``: the paper's weight a, which is the share of past
            classes among all classes that the client has seen. The task loss then has the weight ``1 - a``. With a
            number, the distillation has this weight, and the task loss has the weight 1.
        temperature: Temperature of teacher and student, above 0. The distillation is scaled by the square of the
            temperature.
        divergence_weight: Weight of the divergence loss, at least 0.
        balanced_epochs: Number of epochs of balanced tuning at the end of each task except the first. The paper uses
            20, after 500 epochs of training.

    Raises:
        ValueError: If an argument is out of range, the module does not contain one `DyTox`, or the stream's experiences
            are not tasks of the model.

    Example:
        >>> DyToxMethod(memory_size=0.1, distillation_weight="auto").divergence_weight
        0.1
    """

    citations: ClassVar[tuple[str, ...]] = ("douillard2022dytox",)

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
                f'Expected `distillation_weight` to be "auto" or a number, but got "{self.distillation_weight}".',
                argument="distillation_weight",
            )
        at_least(0, distillation_weight=0 if isinstance(self.distillation_weight, str) else self.distillation_weight)
        # The task whose parameters are trained. None: the parameters of all tasks are trained.
        self._present: int | None = None
        self._tuning = False
        # The samples of balanced tuning.
        self._pool: tuple[Tensor, Tensor] | None = None
        self._drawn = 0
        self._embedded: Tensor | None = None
        self._tap: RemovableHandle | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model, stream = get_dytox(pl_module), find_stream(trainer)
        if stream is not None and not stream.plan.common_tasks:
            raise InvalidValueError(
                "Expected a stream whose tasks are sets of classes without overlap between different tasks, because "
                f"`DyToxMethod` trains one token for each task, but got {stream}.",
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
        """Store the decoder's output in the forward pass of the task's loss, for use in the divergence loss.

        The divergence loss then needs no second forward pass. Outputs of the teacher are not stored.
        """
        if module.training and torch.is_grad_enabled() and self._embedded is None:
            self._embedded = output

    # The two stages of a task: training, and balanced tuning.

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
            # Without a stream, the labels are unknown until the first step.
            self._enter(client, batch[1])
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
        """Return stored samples ``(x, y)``, the same number for each class, including the current task's classes."""
        memory, client_round, stream = client.method_state, client.client_round, find_stream(client.module.trainer)
        generator = torch.Generator().manual_seed(
            derive_seed(client.seed, client_round.client_id, client_round.round_idx, "balanced")
        )
        if stream is not None:
            data = stream.client_samples(client_round.client_id, client_round.round_idx, client.seed)
            memory = add_task_memory(client, data, self.memory_size, generator)
        elif not has_task(memory, client_round.experience_idx):
            raise MissingValueError(
                f"Expected more epochs for a task than `balanced_epochs={self.balanced_epochs}`, but all epochs of the "
                "task are for balanced tuning.",
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

    # Replay, distillation and divergence of past tasks.

    def replay_samples(self, client: Client) -> tuple[Tensor, Tensor] | None:
        # Without a stream, replay samples would be added after `begin_step` has replaced the batch for balanced tuning.
        tunes_alone = self._tuning and not _is_planned(client)
        return None if tunes_alone else past_samples(client)

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self._tuning or self._present is None or "old" not in client.method_state:
            return 0.0
        # `needs.labels` guarantees targets.
        assert step.y is not None
        model, y = get_dytox(client.module), step.y
        classes = torch.arange(len(model.position), device=model.position.device)
        present = model.task_index(classes) == self._present
        old = client.method_state["old"].to(present.device) & ~present
        if not old.any():
            # The client trains its only past task again.
            return 0.0
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
            # The task's loss has called the decoder in this step.
            assert self._embedded is not None
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
    """Return the `DyTox` model of a module. Raise ValueError if the module does not contain exactly one."""
    models = [part for part in module.modules() if isinstance(part, DyTox)]
    if len(models) != 1:
        raise InvalidValueError(
            f"Expected one `DyTox` in the module for `DyToxMethod`, but got {len(models)}.",
            hint="Use `Classifier(model=DyTox(...))`.",
            argument="model",
            value=len(models),
        )
    return models[0]


def _is_planned(client: Client) -> bool:
    """Return whether a `FederatedStream` plans the client's local epochs. Epochs of other loaders are not planned."""
    return find_stream(client.module.trainer) is not None


def _usual_epochs(client: Client) -> int:
    return client.federation.settings.local_epochs if client.federation is not None else 1


def _task_of(model: DyTox, labels: Tensor, client: str) -> int:
    tasks = torch.unique(model.task_index(labels)).tolist()
    if len(tasks) != 1:
        raise InvalidValueError(
            f"Expected an experience with classes of one task of `DyTox`, but client {client} has classes of these "
            f"tasks: {', '.join(map(str, tasks)) or 'none'}.",
            hint="Give `DyTox(tasks=...)` the classes of each experience.",
            argument="tasks",
            value=tasks,
        )
    return int(tasks[0])
