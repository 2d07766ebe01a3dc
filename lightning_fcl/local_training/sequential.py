"""Sequential local training: one client at a time, in the module that Lightning trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.local_trainer import LocalResult
from lightning_fcl.federation.server_optimizer import group_values, load_optimizer_state, optimizer_state
from lightning_fcl.library_errors import LibraryError, match_error
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.context import strip_prefix
from lightning_fcl.methods.keyed_dropout import KeyedRandomness
from lightning_fcl.methods.method import get_driver
from lightning_fcl.rng import Keys, make_client_keys, random_uint64
from lightning_fcl.validation import format_code_names


class SequentialTrainer:
    """A trainer that trains one client at a time. It supports all hooks that Lightning calls around a step.

    Args:
        module: The module.
        methods: Methods of the module's Trainer.
        optimizers: Optimizers of the module.
        keep_optimizer_state: Whether a client keeps its optimizer state between rounds.
        seed: Seed of the clients' random layers and replay samples.
        step: Lightning's training step.
    """

    num_vectorized_clients = 1
    is_stacked = False
    optimizer = None

    def __init__(
        self,
        module: L.LightningModule,
        methods: Sequence[MethodBase],
        optimizers: Sequence[Optimizer],
        keep_optimizer_state: bool,
        seed: int,
        step: Callable[..., Any],
    ) -> None:
        self._module, self._methods, self._optimizers, self._step = module, methods, optimizers, step
        self._keep_optimizer, self._seed = keep_optimizer_state, seed
        # Parameter groups of the optimizers before a client's optimizer state is loaded.
        self._begun: list[list[dict[str, Any]]] = []
        # For each call of `training_step`, the loss, or None if the step has no loss.
        self._step_losses: list[Tensor | None] = []
        # Context in which a step and its backward pass draw random numbers.
        self._random = KeyedRandomness(torch.empty(0))
        # Whether the client's steps may draw random numbers. The first step of the client determines the value.
        self._draws = True

    def with_methods(self, methods: Sequence[MethodBase]) -> SequentialTrainer:
        """Return a trainer with different methods. The new trainer keeps no optimizer state."""
        return SequentialTrainer(self._module, methods, self._optimizers, False, self._seed, self._step)

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        state = states[0]
        self._client_rounds, self._steps, self._step_losses, self._draws = clients, 0, [], True
        self._received = set(state)
        load_state_tensors(self._module, state)
        self._begun = copy.deepcopy([*map(group_values, self._optimizers)]) if self._keep_optimizer else []
        for number, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            load_optimizer_state(optimizer, strip_prefix(optimizer_states[0], str(number)))
        if self._methods:
            get_driver(self._module.trainer).start_clients(clients[0], state, method_states[0], self._seed)

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor | None:
        if self._steps == 1:
            self._draws = self._random.has_read_rng_state
        if self._draws:
            self._random = KeyedRandomness(partial(self._key, self._steps))
        self._steps += 1
        try:
            with self.keyed_rng():
                result: Tensor | None = self._step(batch) if batch_idx is None else self._step(batch, batch_idx)
        except ValueError as error:
            reraise_batchnorm_error(error, self._client_rounds[0])
            raise
        loss: object = result.get("loss") if isinstance(result, Mapping) else result
        # Methods change the loss in place after a manual step has returned.
        self._step_losses.append(loss.detach().clone() if isinstance(loss, Tensor) else None)
        return result

    def _key(self, step: int) -> Tensor:
        """Return the key of the random layers in a step."""
        keys = client_round_keys(self._seed, self._client_rounds, "layers")
        return step_keys(keys, step)[0].to(self._module.device)

    def keyed_rng(self) -> AbstractContextManager[None]:
        """Return a context in which a step and its backward pass draw random numbers from the key of the step."""
        return self._random.recomputable() if self._draws else nullcontext()

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        return step()

    def finish(self) -> LocalResult:
        """Return the client's result, with the state of the module."""
        trained_state = {name: plain_tensor(value) for name, value in state_tensors(self._module).items()}
        if new := [name for name in trained_state if name not in self._received]:
            raise InvalidValueError(
                "Expected a module whose state exists before training, but a training step of client "
                f"{self._client_rounds[0].client_id} has created {format_code_names(new)}.",
                hint="Create the state in `__init__` or in `configure_model`.",
                argument=new[0],
            )
        step_losses = [loss.flatten() for loss in self._step_losses if loss is not None]
        losses: list[float] = torch.cat(step_losses).tolist() if step_losses else []
        driver = get_driver(self._module.trainer) if self._methods else None
        finite = all(map(math.isfinite, losses)) and (driver is None or bool(driver.has_finite_loss))
        client_optimizer_state: StateSection | None = None
        # The key of each optimizer state starts with the index of the optimizer.
        if self._keep_optimizer:
            of_each = (optimizer_state(*each) for each in zip(self._optimizers, self._begun, strict=True))
            client_optimizer_state = {
                f"{number}.{name}": value for number, memory in enumerate(of_each) for name, value in memory.items()
            }
        return LocalResult(
            {name: value[None] for name, value in trained_state.items()},
            [driver.memories if driver is not None else []],
            trained_state,
            client_optimizer_state,
            torch.tensor([finite]),
            # A loss with several numbers is only possible with manual optimization.
            [None if loss is None or loss.numel() != 1 else loss.reshape(1) for loss in self._step_losses],
        )


def reraise_batchnorm_error(error: ValueError, client_round: ClientRound) -> None:
    """Raise InvalidValueError with the client's name if batch normalization failed on a batch of one sample.

    A trial before the first round finds most of these modules. If the module also fails on two
    samples, the trial cannot decide.
    """
    if match_error(error, LibraryError.ONE_SAMPLE):
        raise InvalidValueError(
            f"Expected batches of at least two samples for batch normalization, but client {client_round.client_id} "
            f"has a batch of one sample in round {client_round.round_idx} (samples of the client in this round: "
            f"{client_round.num_samples}).",
            hint="Use a `batch_size` that leaves no single sample, and a partition that gives each client at least two "
            "samples.",
        ) from error


def client_round_keys(seed: int, client_rounds: Sequence[ClientRound], *purpose: str) -> Keys:
    """Return the random keys of some clients in a round. Each ``purpose`` has different keys."""
    if isinstance(client_rounds, ClientRounds):
        return make_client_keys(seed, client_rounds.client_ids, client_rounds.round_idx, *purpose)
    return make_client_keys(seed, [part.client_id for part in client_rounds], client_rounds[0].round_idx, *purpose)


def replay_keys(seed: int, client_rounds: Sequence[ClientRound]) -> Callable[[str], Keys]:
    """Return a function that maps a method's name to the random keys for its replay samples, one key per client."""
    # The word "recall" is part of the seed and must not change, because results of existing runs depend on it.
    return partial(client_round_keys, seed, client_rounds, "recall")


def step_keys(keys: Keys, step: int) -> Tensor:
    """Return the keys of the random layers in a step, shape (clients,)."""
    return torch.from_numpy(random_uint64(keys, 1, start=step)[:, 0].view(np.int64))
