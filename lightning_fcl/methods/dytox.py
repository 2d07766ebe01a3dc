"""DyTox: a task is learnt with a token and a head of its own, past tasks are rehearsed, distilled and told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import overrides
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.episodic import at_task, balanced, knows_task, memory_size, past_tasks, remember_task
from lightning_fcl.methods.functional import states_loss
from lightning_fcl.methods.method import Method, remember, section, with_classes
from lightning_fcl.methods.step import Step, is_labelled
from lightning_fcl.models.dytox import DyTox
from lightning_fcl.randomness import Keys, seed_of

_NEVER = -1e4  # the logit of a class that is not looked at: not -inf, which times 0 is no number


@dataclass(eq=False)
class DyToxTraining(Method):
    """Every step: trains `DyTox` on a new task, its token and its head (Douillard et al. 2022, sections 3.3 and 4.1).

    ``(1 - a) * task loss + a * distillation + divergence * divergence loss``, from the second task of a client on:

    - The tokens and heads of all tasks but the present one are frozen. Body, decoder, and the task's token and heads
      learn.
    - Remembered samples of past tasks join the batches, each once per local epoch. See `GEM` for which are kept.
    - The teacher is the client's own model at the end of its previous task (the server's, if it was not drawn for that
      task's last round). It is distilled over the classes of all the client's past tasks.
    - The present task's divergence head tells its classes apart, and from all others: one class for all samples of
      past tasks.
    - Balanced tuning: in the last epochs of a task the body is frozen, too, and the task's token and heads learn from
      equally many remembered samples of each class of all tasks, with the task's loss alone. In a federation these are
      further local epochs of the task's last round; in a plain Trainer, the task's last epochs. (In the authors' code
      old tokens and heads are tuned, too, at a tenth of the learning rate.)

    A client's task is the model's block of classes that its labels are of, see `DyTox.blocks`; what blocks a
    `FederatedStream` tells, the model takes. Token and heads travel as all other parameters do; the divergence heads,
    which serve training alone, may stay at home: ``reductions={"model.divergence.*": "none"}``. The loss of a task is
    the module's, cross-entropy for `Classifier` (the authors' is binary).

    Args:
        max_size: Samples kept of each task: an int is their number, a float a share of the client's data in a round;
            0: none, and no balanced tuning.
        distillation: Weight of the distillation; ``"auto"``: that of the past classes among all that the client knows,
            where the task's loss has the rest, as in the paper. A number leaves the task's loss as it is.
        temperature: Softens teacher and student, above 0; the distillation is scaled by its square.
        divergence: Weight of the divergence loss, at least 0.
        balanced_epochs: Epochs of balanced tuning, at the end of each task but the first (the paper: 20, after 500).

    Raises:
        ValueError: If the module holds no `DyTox`, or the stream's experiences are not tasks of the model.

    Example:
        >>> DyToxTraining(max_size=0.1, distillation="auto").divergence
        0.1
    """

    vectorizable: ClassVar[bool] = False
    needs_sample_loss: ClassVar[bool] = True
    ends_undrawn: ClassVar[bool] = True

    max_size: int | float = 0.1
    distillation: float | Literal["auto"] = "auto"
    temperature: float = argument(1.0, above, 0)
    divergence: float = argument(0.1, at_least, 0)
    balanced_epochs: int = argument(1, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_size:
            memory_size(max_size=self.max_size)
        if isinstance(self.distillation, str) and self.distillation != "auto":
            raise ValueError(f'Expected `distillation` to be "auto" or a number but got "{self.distillation}".')
        at_least(0, distillation=0 if isinstance(self.distillation, str) else self.distillation)
        self._trainable: set[str] = set()
        self._local_epochs = 1
        self._fresh = self._tuning = False
        self._present: int | None = None  # the task whose parameters alone learn; None: all learn
        self._frozen: tuple[int | None, bool] = (None, False)
        self._embedded: Tensor | None = None
        self._tap: RemovableHandle | None = None
        self._pool: tuple[Tensor, Tensor] | None = None
        self._drawn = 0

    # The method.

    def local_epochs(self, memory: Memory, client_round: ClientRound) -> int | None:
        tunes = self.applies_to(client_round) and self._tunes(client_round)
        return self._local_epochs + self.balanced_epochs if tunes else None

    def _tunes(self, client_round: ClientRound) -> bool:
        return bool(self.max_size and self.balanced_epochs) and client_round.last_round and client_round.experience > 0

    def on_download(self, memory: Memory, server: State, client_round: ClientRound) -> Memory:
        return at_task(memory, client_round)

    def rehearse(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        tasks = past_tasks(memory)
        x, y = ([task[part] for task in tasks] for part in (0, 1))
        return (torch.cat(x), torch.cat(y)) if tasks else None

    def penalty(self, memory: Memory, step: Step) -> Tensor | float:
        if self._tuning or self._present is None or "old" not in memory:
            return 0.0
        assert step.y is not None  # as `needs_labels` has it
        model, y = self._net, step.y
        classes = torch.arange(len(model.position), device=model.position.device)
        present = model.task_of(classes) == self._present
        old = memory["old"].to(present.device) & ~present
        if not old.any():
            return 0.0  # the only past task has come back
        return self._distilled(memory, step, y, old, present) + self._diverged(step, y, present)

    def _distilled(self, memory: Memory, step: Step, y: Tensor, old: Tensor, present: Tensor) -> Tensor | float:
        if not self.distillation:
            return 0.0
        teacher = step.predict(section(memory, "teacher"), step.x)
        student, teacher = (torch.where(old, logits, _NEVER) for logits in (step.output, teacher))
        loss = self.temperature**2 * distillation_loss(student, teacher, self.temperature)
        if self.distillation != "auto":
            return float(self.distillation) * step.mean(loss)
        return (
            old.sum() / (old | present).sum() * step.mean(loss - states_loss(self.module).sample_loss(step.output, y))
        )

    def _diverged(self, step: Step, y: Tensor, present: Tensor) -> Tensor | float:
        if not self.divergence:
            return 0.0
        assert self._embedded is not None and self._present is not None
        model, task = self._net, self._present
        logits = model.divergence[task](self._embedded[:, task])
        targets = torch.where(present[y], model.position[y] - sum(model.sizes[:task]) + 1, 0)
        return self.divergence * step.mean(F.cross_entropy(logits, targets, reduction="none"))

    def end_round(
        self, memory: Memory, own: State, data: Batch, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        if not client_round.drawn and not self.applies_to(client_round):
            return memory
        if self.max_size and (client_round.drawn or not knows_task(memory, client_round.experience)):
            memory = remember_task(memory, data, client_round, self.max_size, generator)
        return self._ended(memory, own, client_round) if client_round.last_round else memory

    def _ended(self, memory: Memory, own: State, client_round: ClientRound) -> Memory:
        """The memory once the present task is a past one: a round's samples are gathered before it begins."""
        block = torch.tensor(self._net.blocks[self._block_of(client_round.labels, client_round.client)])
        old = memory.get("old", torch.zeros(len(self._net.position), dtype=torch.bool))
        memory = {**memory, "old": with_classes(old, block.to(old.device)), "present": torch.tensor(-1)}
        return memory | remember(own, "teacher") if self.distillation else memory

    # Where it meets the model.

    @property
    def _client_round(self) -> ClientRound | None:
        return self.federation.round.client_round if self.federation is not None else None

    @property
    def _net(self) -> DyTox:
        return next(module for module in self.module.modules() if isinstance(module, DyTox))

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = [module for module in pl_module.modules() if isinstance(module, DyTox)]
        if len(found) != 1:
            raise ValueError(
                f"Expected one `DyTox` in the module for `DyToxTraining` but got {len(found)}. Use "
                "`Classifier(model=DyTox(...))`."
            )
        staged = [type(method).__name__ for method in methods_of(trainer) if overrides(method, "trains")]
        if staged:
            raise ValueError(
                f"Expected either `DyToxTraining` or `{staged[0]}`, which both freeze parts, but got both."
            )
        self._trainable = {name for name, p in found[0].named_parameters() if p.requires_grad}
        self._local_epochs = self.federation.strategy.local_epochs if self.federation is not None else 1
        stream = stream_of(trainer)
        if stream is not None:
            found[0].assign(_told(stream))

    def attach(self, memory: Memory, server: State, active: bool = True) -> None:
        self._fresh = True

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._embedded = None
        if self._fresh and (self.federation is not None or is_labelled(batch)):
            self._enter(trainer, batch)
        self._tuning = self.active and self._is_tuning(trainer)
        self._freeze(self._present, self._tuning)
        if self._tuning and self._pool is None:
            self._pool = self._balanced(trainer)
        if self.federation is not None:
            self._balance(batch)

    def _enter(self, trainer: L.Trainer, batch: Batch) -> None:
        model, self._fresh, self._pool, self._drawn = self._net, False, None, 0
        now = self._client_round
        labels = now.labels if now is not None else batch[1]
        if self.active:
            self._present = self._block_of(labels, now.client if now is not None else "local")
            model.learnt[self._present] = 1.0
        else:
            self._present = None
            model.learnt[torch.unique(model.task_of(labels))] = 1.0
        if self._tap is None:
            self._tap = model.decoder.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the task's loss has seen, so that the divergence needs no second pass; not the teacher's."""
        if module.training and torch.is_grad_enabled() and self._embedded is None:
            self._embedded = output

    def _block_of(self, labels: Tensor, client: str) -> int:
        tasks = torch.unique(self._net.task_of(labels)).tolist()
        if len(tasks) != 1:
            raise ValueError(
                f"Expected an experience of classes of one task of `DyTox` but client {client} has those of the tasks "
                f"{', '.join(map(str, tasks)) or 'none'}. Give `DyTox(tasks=...)` the classes of each experience."
            )
        return int(tasks[0])

    def _freeze(self, task: int | None, tuning: bool) -> None:
        """Let a task's parameters and the common ones learn, or all; in tuning not the body."""
        if self._frozen == (task, tuning):
            return
        self._frozen = (task, tuning)
        for name, parameter in self._net.named_parameters():
            part, number, *_ = name.split(".")
            learns = task is None or (not tuning if part == "body" else part == "decoder" or int(number) == task)
            parameter.requires_grad_(learns and name in self._trainable)

    # Balanced tuning.

    def _is_tuning(self, trainer: L.Trainer) -> bool:
        if self.federation is not None:
            now = self._client_round
            return now is not None and self._tunes(now) and self.federation.round.local_epoch >= self._local_epochs
        if not (self.max_size and self.balanced_epochs and int(self.memory["present"])):
            return False
        left, stream = (trainer.max_epochs or 0) - trainer.current_epoch, stream_of(trainer)
        if stream is not None:
            rest = stream.plan.experiences[stream.plan.clients[0]][trainer.current_epoch :]
            left = rest.count(rest[0])
        return 0 < left <= self.balanced_epochs

    def mix(self, memory: Memory, batch: Batch, batch_idx: int, key: Keys) -> None:
        if self._tuning:
            self._balance(batch)  # all methods have seen the batch as it came
        else:
            super().mix(memory, batch, batch_idx, key)

    def _balance(self, batch: Batch) -> None:
        if not self._tuning or self._pool is None:
            return
        size = len(batch[1])
        rows = (torch.arange(size) + self._drawn) % len(self._pool[1])
        self._drawn += size
        for position, values in enumerate(self._pool):
            batch[position] = values[rows.to(values.device)].to(batch[position])

    def _balanced(self, trainer: L.Trainer) -> tuple[Tensor, Tensor]:
        """Equally many remembered samples of each class, the present task's among them."""
        memory, now, federation = self.memory, self._client_round, self.federation
        generator = torch.Generator().manual_seed(trainer.current_epoch)
        if federation is not None and now is not None:
            generator.manual_seed(seed_of(federation.seed, now.client, now.round, "balanced"))
            data = federation.stream.client_samples(now.client, now.round, federation.seed)
            memory = remember_task(memory, data, now, self.max_size, generator)
        elif not knows_task(memory, int(memory["present"])):
            raise ValueError(
                f"Expected more epochs for a task than `balanced_epochs`={self.balanced_epochs} but got no more: none "
                "is left to learn it. Raise `max_epochs`."
            )
        chosen = balanced(memory["y"].cpu(), generator).to(memory["y"].device)
        return memory["x"][chosen], memory["y"][chosen]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        if self.federation is not None and (self._client_round is None or self.federation.round.last_batch):
            self._freeze(None, False)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        self._leave()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        self._freeze(None, False)
        if self._tap is not None:
            self._tap.remove()
        self._tap = self._embedded = self._pool = None


def _told(stream: FederatedStream) -> tuple[tuple[int, ...], ...]:
    blocks = stream.plan.common_tasks
    if not blocks:
        raise ValueError(
            f"Expected a stream that tells tasks of classes, the same for all clients, for `DyToxTraining` but got "
            f'{stream}. Use `scenario="fedvit"`, or "class-incremental" without `order_per_client`.'
        )
    return blocks
