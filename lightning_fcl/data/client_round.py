"""One client's part in one round: what a method may know about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as L


@dataclass(frozen=True)
class ClientRound:
    """One client's part in one round: what a method may know about it.

    Args:
        round: From 0.
        experience: The client's experience in this round, from 0.
        labels: Labels of the client's samples in this round, shape (n,); empty where labels are unknown.
        num_classes: Number of classes of the whole stream; 0 where unknown.
        last_round: Whether this is the last round of the client's experience.
        stream_samples: Number of the client's samples in the whole stream; 0 where unknown.
        rehearsed: Number of remembered samples that join them.
        new_classes: Classes that any client of the federation learns in this round and none has learnt before.
        old_classes: Classes of all clients' earlier experiences. Both are empty where the stream is not of classes.
        task_classes: All classes of the client's current task, ascending, to which a task-incremental method slices the
            logits; empty where all classes compete.
        drawn: Whether the client was sampled for the round.
        in_step: Whether all clients of the stream enter each experience in the same round.
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
    in_step: bool = True

    @property
    def balanced(self) -> bool:
        """Whether all classes are there, the rarest at least half as often as the most frequent."""
        if not self.num_classes or not len(self.labels):
            return False
        counts = torch.bincount(self.labels, minlength=self.num_classes)
        return bool(2 * counts.min() >= counts.max())


@dataclass(frozen=True, eq=False)
class SampleHistory:
    """The numbers of a client's samples of a round, and of the samples of earlier rounds that the client trained in.

    A number is the position of a sample in the dataset of the stream.

    Args:
        numbers: Numbers of the samples of the round, in their order, shape (n,).
        experience: Numbers of the samples of earlier rounds of the current experience, ascending.
        past: Numbers of the samples of earlier experiences, ascending.
        covers_experience: Whether the round has all samples of earlier rounds of the experience.

    Example:
        >>> history = SampleHistory(np.array([4, 5, 6]), np.array([5]), np.array([1, 6]), covers_experience=True)
        >>> history.new, history.new_in_experience
        (tensor([ True, False, False]), tensor([ True,  True, False]))
    """

    numbers: NDArray[np.int64]
    experience: NDArray[np.int64]
    past: NDArray[np.int64]
    covers_experience: bool

    @property
    def new(self) -> Tensor:
        """Whether each sample of the round is in no earlier round that the client trained in, shape (n,)."""
        return self.new_in_experience & torch.from_numpy(~np.isin(self.numbers, self.experience))

    @property
    def new_in_experience(self) -> Tensor:
        """Whether each sample of the round is in no earlier experience that the client trained in, shape (n,)."""
        return torch.from_numpy(~np.isin(self.numbers, self.past))


class ClientRounds(Sequence[ClientRound]):
    """The parts of several clients in a round, each made when it is asked for: most rounds ask for none."""

    def __init__(
        self,
        round: int,
        clients: Sequence[str],
        samples: NDArray[np.int64],
        make: Callable[[str], ClientRound],
        rehearsed: NDArray[np.int64] | None = None,
    ) -> None:
        self.round = round
        self.clients = clients
        self.samples = samples
        self.rehearsed = rehearsed
        self._make = make
        self._made: dict[str, ClientRound] = {}

    @classmethod
    def of(cls, parts: Sequence[ClientRound]) -> ClientRounds:
        known = {part.client: part for part in parts}
        return cls(
            parts[0].round if parts else 0,
            list(known),
            np.array([part.samples for part in parts], dtype=np.int64),
            known.__getitem__,
        )

    @property
    def trained(self) -> NDArray[np.int64]:
        """Number of samples that each client trains on, shape (clients,)."""
        return self.samples if self.rehearsed is None else self.samples + self.rehearsed

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> ClientRound: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientRound]: ...
    def __getitem__(self, index: int | slice) -> ClientRound | Sequence[ClientRound]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        client = self.clients[index]
        if client not in self._made:
            part = self._make(client)
            self._made[client] = part if self.rehearsed is None else replace(part, rehearsed=int(self.rehearsed[index]))
        return self._made[client]


def current_round(trainer: L.Trainer) -> int:
    """The round that a Trainer is in, also before a continued fit has brought its epoch counter up to date."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)
