"""Planning of the batches of all clients before a round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lightning_fcl.data.batching import order_keys, plan_group_batches
from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.methods.compose import local_epochs_fn
from lightning_fcl.methods.method_round import client_before
from lightning_fcl.methods.replay_samples import joining_samples
from lightning_fcl.simulation.client_group import ClientGroup
from lightning_fcl.simulation.federation import Federation

_PLANNED = 100_000
"""Maximum number of samples, including padding, whose batches are planned together in sequential training."""


def plan_client_groups(
    federation: Federation, client_groups: Sequence[Sequence[str]], round_idx: int
) -> list[ClientGroup]:
    """Return the client groups of a round, with the batches of each client.

    Args:
        federation: The federation.
        client_groups: The names of the clients of each group.
        round_idx: Number of the round, from 0.

    Returns:
        One group per sequence of names. In each group, the clients with the most batches come first.
    """
    stream, part_of = federation.stream, partial(federation.stream.client_round, round_idx=round_idx)
    rows_of = stream.plan.train[round_idx]
    batching = federation.limits.batch_plan(stream)
    client_factory = partial(client_before, federation.server, federation.module)
    replayed = joining_samples(federation.methods, client_factory)
    epochs_in = local_epochs_fn(federation.methods, client_factory, federation.settings.local_epochs)
    is_sequential = all(len(names) == 1 for names in client_groups)
    if is_sequential:  # Planning several clients together is faster.
        client_names = [name for (name,) in client_groups]
        step = max(1, _PLANNED // max([1, *(len(rows_of[name]) for name in client_names)]))
        client_groups = [client_names[start : start + step] for start in range(0, len(client_names), step)]
    planned_groups: list[ClientGroup] = []
    for names in client_groups:
        samples = np.array([len(rows_of[name]) for name in names], dtype=np.int64)
        parts = ClientRounds(round_idx, names, samples, part_of)
        if isinstance(epochs_in, int):
            epochs = np.full(len(names), epochs_in)
        else:
            epochs = np.array([epochs_in(part) for part in parts])
        remembered = None if replayed is None else np.array([len(replayed(part)) for part in parts])
        keys = order_keys(federation.seed, names, round_idx)
        index, lengths = plan_group_batches(samples, epochs, batching, keys, remembered)
        steps, per_epoch = np.count_nonzero(lengths, axis=1), batching.batches_per_epoch(samples, remembered)
        order = np.argsort(-steps, kind="stable")
        for rows in np.arange(len(names))[:, None] if is_sequential else [order]:
            group_lengths = lengths[rows, : steps[rows].max()]
            clients = ClientRounds(
                round_idx,
                [names[row] for row in rows],
                samples[rows],
                part_of,
                None if remembered is None else remembered[rows],
            )
            batches = index[rows, : group_lengths.shape[1], : group_lengths.max()]
            own_epochs = epochs[rows], per_epoch[rows]
            local = federation.local_trainer, federation.local_steps.accumulate_grad_batches
            planned_groups.append(
                ClientGroup(federation, *local, clients, replayed, *own_epochs, batches, group_lengths)
            )
    return planned_groups
