"""The batches of the clients of a round, planned before the round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lightning_fcl.data.batches import order_keys, plan_cohort
from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.methods.compose import epochs_of
from lightning_fcl.methods.method_round import client_before
from lightning_fcl.methods.replay_samples import joining_samples
from lightning_fcl.simulation.cohort import Cohort
from lightning_fcl.simulation.federation import Federation

_PLANNED = 100_000
"""Number of samples, with padding, of sequentially trained clients whose batches are planned at once."""


def planned(federation: Federation, cohorts: Sequence[Sequence[str]], round: int) -> list[Cohort]:
    """Return the groups of clients of a round, given by their names, with the batches of each client."""
    stream, part_of = federation.stream, partial(federation.stream.client_round, round=round)
    rows_of = stream.plan.train[round]
    batching = federation.limits.batching(stream)
    before = partial(client_before, federation.server, federation.module)
    replayed = joining_samples(federation.methods, before)
    epochs_in = epochs_of(federation.methods, before, federation.settings.local_epochs)
    alone = all(len(names) == 1 for names in cohorts)
    if alone:  # several are planned at once all the same
        every = [name for (name,) in cohorts]
        step = max(1, _PLANNED // max([1, *(len(rows_of[name]) for name in every)]))
        cohorts = [every[start : start + step] for start in range(0, len(every), step)]
    found: list[Cohort] = []
    for names in cohorts:
        samples = np.array([len(rows_of[name]) for name in names], dtype=np.int64)
        parts = ClientRounds(round, names, samples, part_of)
        if isinstance(epochs_in, int):
            epochs = np.full(len(names), epochs_in)
        else:
            epochs = np.array([epochs_in(part) for part in parts])
        remembered = None if replayed is None else np.array([len(replayed(part)) for part in parts])
        keys = order_keys(federation.seed, names, round)
        index, lengths = plan_cohort(samples, epochs, batching, keys, remembered)
        steps, per_epoch = np.count_nonzero(lengths, axis=1), batching.per_epoch(samples, remembered)
        order = np.argsort(-steps, kind="stable")
        for rows in np.arange(len(names))[:, None] if alone else [order]:
            own = lengths[rows, : steps[rows].max()]
            clients = ClientRounds(
                round,
                [names[row] for row in rows],
                samples[rows],
                part_of,
                None if remembered is None else remembered[rows],
            )
            batches = index[rows, : own.shape[1], : own.max()]
            own_epochs = epochs[rows], per_epoch[rows]
            local = federation.local_trainer, federation.local_steps.every
            found.append(Cohort(federation, *local, clients, replayed, *own_epochs, batches, own))
    return found
