"""Local training of one client at a time, in the module that Lightning trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.errors import InvalidValueError, quoted
from lightning_fcl.federation.aggregation import State, entries, load_entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.federation.optimizers import group_values, optimizer_memory, restore_optimizer
from lightning_fcl.library_errors import LibraryError, match_error
from lightning_fcl.methods.client import section
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.methods.method import driver_of
from lightning_fcl.methods.random_layers import KeyedRandomness
from lightning_fcl.randomness import Keys, keys_of, numbers


class SequentialTrainer:
    """Trains one client after the other: any LightningModule, with all that Lightning does around a step.

    Args:
        module: The module.
        methods: The methods of its Trainer.
        optimizers: Its optimizers.
        keep_optimizer: Whether a client's optimizer state lasts from round to round.
        seed: Seed of clients' random layers and replay samples.
        step: Lightning's own training step.
    """

    clients_at_once = 1
    stacked = False
    optimizer = None

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[Declaration],
        optimizers: Sequence[Optimizer],
        keep_optimizer: bool,
        seed: int,
        step: Callable[..., Any],
    ) -> None:
        self._module, self._methods, self._optimizers, self._step = module, methods, optimizers, step
        self._keep_optimizer, self._seed = keep_optimizer, seed
        self._begun: list[list[dict[str, Any]]] = []  # the optimizers' groups, of a client that has kept none
        self._losses: list[Tensor] = []  # of the client's steps
        self._random = KeyedRandomness(torch.empty(0))  # what a step, and its backward pass, draw by
        self._draws = True  # whether steps of the client may draw: its first step tells

    def with_methods(self, methods: Sequence[Declaration]) -> SequentialTrainer:
        """Return such a trainer with other methods, which keeps no optimizer."""
        return SequentialTrainer(self._module, methods, self._optimizers, False, self._seed, self._step)

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        state = states[0]
        self._client_rounds, self._steps, self._losses, self._draws = clients, 0, [], True
        self._received = set(state)
        load_entries(self._module, state)
        self._begun = copy.deepcopy([*map(group_values, self._optimizers)]) if self._keep_optimizer else []
        for number, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            restore_optimizer(optimizer, section(optimizers[0], str(number)))
        if self._methods:
            driver_of(self._module.trainer).begin(clients[0], state, memories[0], self._seed)

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor | None:
        if self._steps == 1:
            self._draws = self._random.met
        if self._draws:
            self._random = KeyedRandomness(partial(self._key, self._steps))
        self._steps += 1
        try:
            with self.drawing():
                loss: Tensor | None = self._step(batch) if batch_idx is None else self._step(batch, batch_idx)
        except ValueError as error:
            explain(error, self._client_rounds[0])
            raise
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        return loss

    def _key(self, step: int) -> Tensor:
        """What random layers draw by in a step."""
        keys = client_keys(self._seed, self._client_rounds, "layers")
        return step_keys(keys, step)[0].to(self._module.device)

    def drawing(self) -> AbstractContextManager[None]:
        """What draws in a step, and in its backward pass, draws by its key."""
        return self._random.drawing() if self._draws else nullcontext()

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        return step()

    def finish(self) -> Trained:
        """Take the client's state from the module."""
        own = {name: plain_tensor(value) for name, value in entries(self._module).items()}
        if new := [name for name in own if name not in self._received]:
            raise InvalidValueError(
                "Expected a module whose state is there before it trains but a step of client "
                f"{self._client_rounds[0].client} has made {quoted(new)}.",
                hint="Make it in `__init__` or in `configure_model`.",
                argument=new[0],
            )
        losses: list[float] = torch.cat([loss.flatten() for loss in self._losses]).tolist() if self._losses else []
        driver = driver_of(self._module.trainer) if self._methods else None
        finite = all(map(math.isfinite, losses)) and (driver is None or bool(driver.finite))
        kept: Memory | None = None
        if self._keep_optimizer:  # what the optimizers know, each below its number
            of_each = (optimizer_memory(*each) for each in zip(self._optimizers, self._begun, strict=True))
            kept = {
                f"{number}.{name}": value for number, memory in enumerate(of_each) for name, value in memory.items()
            }
        return Trained(
            {name: value[None] for name, value in own.items()},
            [driver.memories if driver is not None else []],
            own,
            kept,
            torch.tensor([finite]),
        )


def explain(error: ValueError, part: ClientRound) -> None:
    """Raise an error that names the client if batch normalization fails on a batch of one sample.

    A trial before the first round finds such modules, except those whose step fails in the trial.
    """
    if match_error(error, LibraryError.ONE_SAMPLE):
        raise InvalidValueError(
            f"Expected batches of at least two samples for batch normalization, but client {part.client} has a batch "
            f"of one sample in round {part.round}, of {part.samples} samples.",
            hint="Use a `batch_size` that leaves no single sample, and a partition that gives each client at least two "
            "samples.",
        ) from error


def client_keys(seed: int, client_rounds: Sequence[ClientRound], *of: str) -> Keys:
    """Return the keys of some clients in a round, for the draws that ``of`` names."""
    if isinstance(client_rounds, ClientRounds):
        return keys_of(seed, client_rounds.clients, client_rounds.round, *of)
    return keys_of(seed, [part.client for part in client_rounds], client_rounds[0].round, *of)


def replay_keys(seed: int, client_rounds: Sequence[ClientRound]) -> Callable[[str], Keys]:
    """Return a function from a method's name to the keys by which its clients' replay samples are drawn."""
    return partial(client_keys, seed, client_rounds, "recall")  # the word is part of the seed of existing runs


def step_keys(keys: Keys, step: int) -> Tensor:
    """What the draws of random layers depend on in a step, shape (clients,)."""
    return torch.from_numpy(numbers(keys, 1, start=step)[:, 0].view(np.int64))
