"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from lightning_fcl.data.batches import round_half_up
from lightning_fcl.data.scenarios import Plan
from lightning_fcl.randomness import seed_of


def participants(
    plan: Plan, round: int, participation: float | int, seed: int, absent: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """The clients of a round, in the plan's order: those that train, and those that were chosen but have no data.

    Args:
        plan: Who has data in which round.
        round: Round, from 0.
        participation: Share (a float) or number (an int) of all clients; at least one client always trains.
        seed: Seed of the choice.
        absent: Clients that are gone; the choice among the others is not touched by it.

    Raises:
        ValueError: If no client has data in the round.
    """
    clients, present = plan.clients, {c: rows for c, rows in plan.train[round].items() if c not in absent}
    if not present:
        gone = f" that has not left, as {', '.join(sorted(absent))} have. Lower `max_epochs`" if absent else ""
        raise ValueError(f"Expected at least one client with data in round {round} but none has any{gone}.")
    number = round_half_up(participation * len(clients)) if isinstance(participation, float) else participation
    rng = np.random.default_rng(seed_of(seed, "participation", round))
    chosen = set(rng.permutation(len(clients))[: max(1, number)].tolist())
    training = [client for i, client in enumerate(clients) if i in chosen and client in present]
    skipped = [c for i, c in enumerate(clients) if i in chosen and c not in present and c not in absent]
    if not training:
        training = [sorted(present)[int(rng.integers(len(present)))]]
    return training, skipped
