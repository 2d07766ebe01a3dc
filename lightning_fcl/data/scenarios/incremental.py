"""Class- and domain-incremental streams; Avalanche draws the experiences."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fcl.data.scenarios.plan import History, IntArray, with_history


class Indices:
    """A data set for Avalanche: labels, and samples that are nothing but their own indices."""

    def __init__(self, indices: IntArray, y: IntArray) -> None:
        self.indices = indices
        self.targets = [int(label) for label in y[indices]]

    def __getitem__(self, item: int) -> tuple[int, int]:
        return int(self.indices[item]), self.targets[item]

    def __len__(self) -> int:
        return len(self.targets)


def class_experiences(
    indices: IntArray, y: IntArray, experiences: int, order: Sequence[int] | None, seed: int
) -> tuple[list[IntArray], list[tuple[int, ...]]]:
    """Class-incremental experiences of some samples, built by Avalanche.

    Args:
        indices: The samples, as indices into ``y``.
        y: Labels of the whole data set.
        experiences: Number of experiences; it must divide the number of classes among the samples.
        order: Order of the classes; None draws one from ``seed``.
        seed: Seed of the class order.

    Returns:
        The samples and the classes of each experience.

    Raises:
        ValueError: If the classes cannot be divided evenly or ``order`` is not an order of the classes.
    """
    from avalanche.benchmarks import nc_benchmark

    classes = np.unique(y[indices])
    if experiences < 1 or len(classes) % experiences:
        raise ValueError(
            f"Expected `experiences` to divide the number of classes, {len(classes)}, but got {experiences}."
        )
    if order is not None and (len(set(order)) < len(order) or not set(classes.tolist()) <= set(order)):
        raise ValueError(f"Expected `class_order` to order all classes {classes.tolist()} but got {list(order)}.")
    rank = {int(c): i for i, c in enumerate(classes)}  # Avalanche wants classes 0..C-1
    compact = np.array([rank[int(label)] for label in y[indices]], dtype=np.int64)
    # Avalanche decides over classes but looks at every sample: one of each class is enough for it.
    data = Indices(np.unique(compact, return_index=True)[1], compact)
    fixed = [rank[c] for c in order if c in rank] if order is not None else None
    with warnings.catch_warnings(), isolate_rng():  # Avalanche seeds torch's global generator
        warnings.simplefilter("ignore")
        benchmark = nc_benchmark(
            data, data, n_experiences=experiences, task_labels=False, seed=seed, fixed_class_order=fixed
        )
    samples, groups = [], []
    for experience in benchmark.train_stream:
        members = np.isin(compact, experience.classes_in_this_experience)
        samples.append(indices[members])
        groups.append(tuple(sorted(int(classes[c]) for c in experience.classes_in_this_experience)))
    return samples, groups


def domain_experiences(
    indices: IntArray, group: IntArray, order: Sequence[int] | None
) -> tuple[list[IntArray], list[tuple[int, ...]]]:
    """Domain-incremental experiences: one per value of ``group``, in ``order`` (default: ascending).

    Raises:
        ValueError: If ``order`` leaves out a domain of the samples or has one twice.
    """
    present = np.unique(group[indices]).tolist()
    domains = present if order is None else list(order)
    if len(set(domains)) < len(domains) or not set(present) <= set(domains):
        raise ValueError(f"Expected `class_order` to order all domains {present} but got {domains}.")
    return [indices[group[indices] == d] for d in domains], [(int(d),) for d in domains]


def rounds_of(
    experiences: Mapping[str, Sequence[IntArray]],
    rounds_per_experience: int,
    samples_per_round: int | None,
    history: History,
    rng: np.random.Generator,
) -> tuple[dict[str, IntArray], ...]:
    """Spread each client's experiences over rounds.

    Args:
        experiences: For every client, the samples of each of its experiences.
        rounds_per_experience: Rounds that each experience lasts.
        samples_per_round: New samples of a round, never used again; None: all of the experience's samples, every round.
        history: ``"round"``: a round's own samples; ``"seen"``: those of all rounds so far; ``"all"``: of all rounds
            (offline learning, an upper bound).
        rng: Draws the samples of each round.

    Raises:
        ValueError: If an experience has too few samples for its rounds, or ``samples_per_round`` is below 1.
    """
    if samples_per_round is not None and samples_per_round < 1:
        raise ValueError(f"Expected `samples_per_round` to be at least 1 but got {samples_per_round}.")
    rounds: list[dict[str, IntArray]] = []
    shuffled = {client: [rng.permutation(samples) for samples in parts] for client, parts in experiences.items()}
    for r in range(rounds_per_experience * max(len(parts) for parts in experiences.values())):
        e, within = divmod(r, rounds_per_experience)
        current: dict[str, IntArray] = {}
        for client, parts in shuffled.items():
            if e >= len(parts):
                continue
            samples = parts[e]
            if samples_per_round is not None:
                samples = samples[within * samples_per_round : (within + 1) * samples_per_round]
                if len(samples) < samples_per_round and len(parts[e]):
                    raise ValueError(
                        f"Expected `samples_per_round` to leave enough samples for {rounds_per_experience} rounds of "
                        f"experience {e} of client {client}, which has {len(parts[e])}, but got {samples_per_round}."
                    )
            if len(samples):
                current[client] = np.sort(samples)
        rounds.append(current)
    return with_history(rounds, history)


def incremental(
    kind: Literal["class-incremental", "domain-incremental"],
    y: IntArray,
    owners: Mapping[str, IntArray],
    group: IntArray | None,
    *,
    experiences: int,
    rounds_per_experience: int,
    samples_per_round: int | None,
    order: Sequence[int] | None,
    order_per_client: bool,
    history: History,
    seed: int,
) -> dict[str, Any]:
    """The `Plan` entries of a class- or domain-incremental stream over the samples that ``owners`` hold."""
    rng = np.random.default_rng([seed, 1])
    everything = np.sort(np.concatenate(list(owners.values())))
    if kind == "domain-incremental" and group is None:
        raise ValueError("Expected `group`, the domain of every sample, for a domain-incremental stream but got None.")
    parts: dict[str, list[IntArray]] = {}
    tasks: dict[str, tuple[tuple[int, ...], ...]] = {}
    shared = None
    for position, (client, indices) in enumerate(owners.items()):
        if kind == "domain-incremental":
            assert group is not None
            mine = np.unique(group[indices]).tolist()
            chosen = rng.permutation(mine).tolist() if order_per_client else order or np.unique(group).tolist()
            samples, groups = domain_experiences(indices, group, chosen)
        elif order_per_client:
            samples, groups = class_experiences(indices, y, experiences, None, seed + 1 + position)
        else:
            shared = shared or class_experiences(everything, y, experiences, order, seed)
            groups = shared[1]
            samples = [np.intersect1d(indices, whole, assume_unique=True) for whole in shared[0]]
        parts[client], tasks[client] = samples, tuple(groups)
    train = rounds_of(parts, rounds_per_experience, samples_per_round, history, rng)
    current = tuple(r // rounds_per_experience for r in range(len(train)))
    groups_of = np.asarray(group if kind == "domain-incremental" else y)
    plan = {"train": train, "experiences": dict.fromkeys(owners, current), "tasks": tasks, "groups": groups_of}
    return {**plan, "of_classes": kind == "class-incremental"}
