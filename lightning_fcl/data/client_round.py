"""One client's part in one round: what a method may know about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as L


@dataclass(frozen=True)
class ClientRound:
    """One client's part in one round: what a method may know about it.

    Args:
        client: The client's id.
        round: Round, from 0.
        experience: The client's experience in this round, from 0.
        labels: Labels of the client's samples in this round, shape (n,); empty where labels are unknown.
        num_classes: Number of classes of the whole stream; 0 where unknown.
        last_round: Whether this is the last round of the client's experience.
        samples: Number of samples of this round.
        stream_samples: Number of the client's samples in the whole stream; 0 where unknown.
        rehearsed: Number of remembered samples that join them.
        new_classes: Classes that any client of the federation learns in this round and none has learnt before.
        old_classes: Classes of all clients' earlier experiences. Both are empty where the stream is not of classes.
        task_classes: All classes of the client's current task, ascending, to which a task-incremental method slices the
            logits; empty where all classes compete.
        drawn: Whether the client was drawn for the round.
    """

    client: str
    round: int
    experience: int = 0
    labels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    num_classes: int = 0
    last_round: bool = True
    samples: int = 0
    stream_samples: int = 0
    rehearsed: int = 0
    new_classes: tuple[int, ...] = ()
    old_classes: tuple[int, ...] = ()
    task_classes: tuple[int, ...] = ()
    drawn: bool = True

    def not_drawn(self) -> ClientRound:
        """The same part of a client that was not drawn for the round."""
        return replace(self, drawn=False)

    @property
    def balanced(self) -> bool:
        """Whether all classes are there, the rarest at least half as often as the most frequent."""
        if not self.num_classes or not len(self.labels):
            return False
        counts = torch.bincount(self.labels, minlength=self.num_classes)
        return bool(2 * counts.min() >= counts.max())


def current_round(trainer: L.Trainer) -> int:
    """The round that a Trainer is in, also before a continued fit has brought its epoch counter up to date."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)
