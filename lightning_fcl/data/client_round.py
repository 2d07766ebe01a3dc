"""Data about a client's round that methods can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as L


@dataclass(frozen=True)
class ClientRound:
    """Data about a client's round that methods can read.

    Args:
        client_id: Name of the client.
        round_idx: Index of the round, from 0.
        experience_idx: Index of the client's experience in this round, from 0.
        labels: Labels of the client's samples in this round, shape (n,). Empty if labels are unknown.
        num_classes: Number of classes of the whole stream. 0 if unknown.
        is_last_round: Whether this is the last round of the client's experience.
        num_samples: Number of the client's samples in this round, without replay samples.
        num_stream_samples: Number of the client's samples in the whole stream. 0 if unknown.
        num_replay_samples: Number of replay samples that are added to the samples of this round.
        new_classes: Classes that at least one client has in its current experience, and no client has in an earlier
            experience. Empty if the classes of the stream are unknown, or if the targets are not classes.
        old_classes: Classes that at least one client has in an earlier experience. Empty in the same cases.
        task_classes: All classes of the client's current task, in ascending order. A task-incremental method restricts
            the logits to these classes. Empty if the logits of all classes are used.
        in_step: Whether all clients of the stream start each experience in the same round.
    """

    client_id: str
    round_idx: int
    experience_idx: int = 0
    labels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    num_classes: int = 0
    is_last_round: bool = True
    num_samples: int = 0
    num_stream_samples: int = 0
    num_replay_samples: int = 0
    new_classes: tuple[int, ...] = ()
    old_classes: tuple[int, ...] = ()
    task_classes: tuple[int, ...] = ()
    in_step: bool = True

    @property
    def is_balanced(self) -> bool:
        """Whether all classes have samples, and the rarest has at least half as many samples as the most frequent."""
        if not self.num_classes or not len(self.labels):
            return False
        counts = torch.bincount(self.labels, minlength=self.num_classes)
        return bool(2 * counts.min() >= counts.max())


@dataclass(frozen=True, eq=False)
class SampleHistory:
    """The numbers of the samples that a client has in a round, and in the earlier rounds in which the client trained.

    The number of a sample is its position in the dataset of the stream. Derived values are computed on first access.

    Args:
        numbers: Numbers of the samples that were read in the round, in the order of reading, shape (n,).
        available: Numbers of all samples of the round. If batches are dropped, this includes samples that are not read.
        experience: For each earlier round of the current experience in which the client trained, the numbers of the
            round's samples.
        past: For each round of earlier experiences in which the client trained, the numbers of the round's samples.

    Example:
        >>> numbers = np.array([4, 5, 6])
        >>> history = SampleHistory(numbers, numbers, [np.array([5])], [np.array([1, 6])])
        >>> history.new, history.new_in_experience, history.covers_experience
        (tensor([ True, False, False]), tensor([ True,  True, False]), True)
    """

    numbers: NDArray[np.int64]
    available: NDArray[np.int64]
    experience: Sequence[NDArray[np.int64]] = ()
    past: Sequence[NDArray[np.int64]] = ()

    @cached_property
    def covers_experience(self) -> bool:
        """Whether the round contains all samples of the earlier rounds in ``experience``."""
        return all(bool(np.isin(earlier, self.available).all()) for earlier in self._others)

    @cached_property
    def new(self) -> Tensor:
        """Mask of the round's samples that are in no earlier round in which the client trained, shape (n,)."""
        # `_others` leaves out earlier rounds that share the array of the current round. In that case, no sample is new.
        if len(self._others) < len(self.experience):
            return torch.zeros(len(self.numbers), dtype=torch.bool)
        return self.new_in_experience & ~self._within(self._others)

    @cached_property
    def new_in_experience(self) -> Tensor:
        """Mask of the round's samples that are in no earlier experience in which the client trained, shape (n,)."""
        return ~self._within(self.past)

    @cached_property
    def _others(self) -> list[NDArray[np.int64]]:
        """Earlier rounds of the experience that do not share the array of samples of the current round."""
        return [earlier for earlier in self.experience if earlier is not self.available]

    def _within(self, rounds: Sequence[NDArray[np.int64]]) -> Tensor:
        """Return a mask of the current round's samples that are in at least one of the given rounds, shape (n,)."""
        if not rounds:
            return torch.zeros(len(self.numbers), dtype=torch.bool)
        return torch.from_numpy(np.isin(self.numbers, np.concatenate(list({id(own): own for own in rounds}.values()))))


class ClientRounds(Sequence[ClientRound]):
    """A sequence with the `ClientRound` of each client. Each item is created on first access."""

    def __init__(
        self,
        round_idx: int,
        client_ids: Sequence[str],
        num_samples: NDArray[np.int64],
        make_client_round: Callable[[str], ClientRound],
        num_replay_samples: NDArray[np.int64] | None = None,
    ) -> None:
        self.round_idx = round_idx
        self.client_ids = client_ids
        self.num_samples = num_samples
        self.num_replay_samples = num_replay_samples
        self._make = make_client_round
        self._made: dict[str, ClientRound] = {}

    @classmethod
    def from_rounds(cls, client_rounds: Sequence[ClientRound]) -> ClientRounds:
        rounds_by_client = {part.client_id: part for part in client_rounds}
        return cls(
            client_rounds[0].round_idx if client_rounds else 0,
            list(rounds_by_client),
            np.array([part.num_samples for part in client_rounds], dtype=np.int64),
            rounds_by_client.__getitem__,
        )

    @property
    def num_trained_samples(self) -> NDArray[np.int64]:
        """Number of samples that each client trains on, shape (clients,)."""
        return self.num_samples if self.num_replay_samples is None else self.num_samples + self.num_replay_samples

    def __len__(self) -> int:
        return len(self.client_ids)

    @overload
    def __getitem__(self, index: int) -> ClientRound: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientRound]: ...
    def __getitem__(self, index: int | slice) -> ClientRound | Sequence[ClientRound]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        client = self.client_ids[index]
        if client not in self._made:
            client_round = self._make(client)
            self._made[client] = (
                client_round
                if self.num_replay_samples is None
                else replace(client_round, num_replay_samples=int(self.num_replay_samples[index]))
            )
        return self._made[client]


def current_round(trainer: L.Trainer) -> int:
    """Return the index of a Trainer's current round, even before a resumed fit restores the Trainer's epoch counter."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)
