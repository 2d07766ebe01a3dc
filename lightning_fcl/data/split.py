"""The split of samples into training, validation and test data, and the function that draws the plan of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lightning_fcl.data.origins import check_apart, warn_of_equal
from lightning_fcl.data.partition import IID, Partition
from lightning_fcl.data.samples import Samples
from lightning_fcl.data.scenarios import EMPTY, IntArray, Plan, SamplePool, Scenario, concat_views, stratified_split
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.validation import did_you_mean, format_names, validate_fields


@dataclass(frozen=True)
class Split:
    """A split of samples into training, validation and test data.

    Two samples have the same origin if, for example, two clients have the same item of a dataset. If a set is a
    fraction, all samples of the same origin are put into one set. If sets are defined by owners or by the data,
    different sets must not contain samples of the same origin.

    Args:
        test: The test set. A number is the fraction of the samples of each class. ``"official"`` is the test set of the
            data. A list names owners (subjects, users) whose samples form the test set, for example to test on clients
            that join later.
        validation: The validation set. A number is the fraction of the remaining samples of each class. ``"official"``
            is the validation set of the data. A list names owners.
        train_clients: Owners whose samples are used for training. None means all remaining owners.
    """

    test: float | Literal["official"] | list[str] = 0.2
    validation: float | Literal["official"] | list[str] = 0.0
    train_clients: list[str] | None = None

    def __post_init__(self) -> None:
        validate_fields(self)

    def split_indices(self, samples: Samples, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
        """Return the indices of the training, validation and test samples, in this order.

        Raises:
            ValueError: If the data do not have the requested sets or owners, or if no training samples remain.
        """
        rest, test = _set_aside("test", self.test, np.arange(len(samples)), samples, rng)
        train, validation = _set_aside("validation", self.validation, rest, samples, rng)
        if self.train_clients is not None:
            train = _set_aside("train_clients", self.train_clients, train, samples, rng)[1]
        if not len(train):
            raise InvalidValueError(
                "Expected `test`, `validation` and `train_clients` to leave training samples, but got "
                f"`test`={self.test}, `validation`={self.validation} and `train_clients`={self.train_clients}, which "
                "leave none.",
                hint="Use smaller fractions for `test` and `validation`, or select other owners.",
                argument="test",
            )
        return train, validation, test


def _set_aside(
    name: Literal["test", "validation", "train_clients"],
    selection: float | str | Sequence[str],
    indices: IntArray,
    samples: Samples,
    rng: np.random.Generator,
) -> tuple[IntArray, IntArray]:
    """Return the remaining samples, and the samples that an argument selects, in this order."""
    if selection == "official":
        official = samples.test if name == "test" else samples.validation
        if official is None:
            raise InvalidValueError(
                f'Expected `{name}` to be a fraction, but got "official", and {samples.name} has no official '
                f"{name} set.",
                hint=f"Use a fraction, such as `{name}=0.2`.",
                argument=name,
            )
        return indices[~official[indices]], indices[official[indices]]
    if isinstance(selection, float | int):
        return _set_fraction_aside(name, float(selection), indices, samples, rng)
    if isinstance(selection, str):
        fraction = "a list of owners" if name == "train_clients" else 'a fraction, "official" or a list of owners'
        hint = did_you_mean(selection, ["official"])
        raise UnknownNameError(f'Expected `{name}` to be {fraction}, but got "{selection}".', hint=hint, argument=name)
    if samples.client_ids is None:
        wanted_instead = "no `train_clients`" if name == "train_clients" else f"`{name}` to be a fraction"
        other = "Remove `train_clients`" if name == "train_clients" else f"Use a fraction, such as `{name}=0.2`"
        raise InvalidValueError(
            f"Expected {wanted_instead}, but got {selection}, and {samples.name} has no owners.",
            hint=f"{other}, or pass the owners as `client_ids` to `FederatedStream.from_arrays`.",
            argument=name,
            value=selection,
        )
    present = samples.client_ids[indices].astype(str)
    owner_names = np.array([str(owner) for owner in selection])
    missing = sorted(set(owner_names) - set(present))
    if missing:
        present_owners = format_names(sorted(set(present))) or "the remaining owners (none)"
        raise InvalidValueError(
            f"Expected the owners in `{name}` to be among {present_owners}, but got {format_names(missing)}.",
            hint=did_you_mean(missing[0], present.tolist()) or f"Remove {format_names(missing)} from `{name}`.",
            argument=name,
        )
    among_them = np.isin(present, owner_names)
    return indices[~among_them], indices[among_them]


def _set_fraction_aside(
    name: str, fraction: float, indices: IntArray, samples: Samples, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Return the remaining samples, and a fraction of each class. Samples of one origin are in the same result."""
    if samples.origin is None:
        rest, subset = stratified_split(samples.labels[indices], fraction, rng, name)
        return indices[rest], indices[subset]
    origin = samples.origin[indices]
    different = indices[np.sort(np.unique(origin, return_index=True)[1])]
    _, subset = stratified_split(samples.labels[different], fraction, rng, name)
    is_chosen = np.isin(origin, samples.origin[different[subset]])
    return indices[~is_chosen], indices[is_chosen]


def _check_no_leakage(samples: Samples, plan: Plan, scenario: Scenario) -> None:
    """Raise ValueError if two sets share samples of one origin. Warn if test samples equal training samples."""
    if samples.origin is None and samples.name != Samples.name:
        # Equal samples in a public dataset are part of the published data, so they are not checked.
        return
    is_trained = np.zeros(len(samples), dtype=np.bool_)
    is_trained[np.concatenate([plan.pretrain, plan.base_samples])] = True
    for current in plan.different_rounds:
        is_trained[np.concatenate([EMPTY, *current.values()])] = True
    trained = np.flatnonzero(is_trained)
    if samples.origin is not None:
        remedy = (
            "Remove the shared samples from one of the two sets, or pass `split=Split(test=0.2)`, which puts all "
            "copies into one set."
        )
        if scenario.provides_split:
            remedy = f"Remove the copies from the data, because `{scenario}` draws the test samples itself."
        parts = {"training": trained, "validation": plan.validation, "test": plan.test}
        check_apart(samples.origin, parts, samples.client_ids, remedy)
    warn_of_equal(samples.x, samples.targets, trained, plan.test)


def check_classes(samples: Samples, scenario: Scenario, partition: Partition | None = None) -> None:
    """Raise ValueError if a scenario or a partition needs classes but the targets of the samples are not classes."""
    if samples.classes:
        return
    actual_targets = f"targets of type {samples.targets.dtype}" if len(samples.targets) else "no known targets"
    actual_targets += " with `classes=()`" if len(samples.targets) and samples.targets.dtype.kind in "biu" else ""
    for component, name, instead in (
        (scenario, str(scenario), "`Stationary`, or `DomainIncremental` with the `group` of each sample"),
        (partition, type(partition).__name__, "another `partition`, such as `IID`"),
    ):
        if component is not None and component.needs_classes:
            raise InvalidValueError(
                f"Expected targets that are classes for `{name}`, but got {actual_targets}.",
                hint=f"Use {instead}, or pass labels as `y` (names or whole numbers, as in `y.astype(int)`) without "
                "`classes=()`.",
                argument="y",
                value=name,
            )


def draw_split(
    samples: Samples, scenario: Scenario, partition: Partition | None, division: Split | None, seed: int
) -> tuple[Samples, Plan]:
    """Return the samples of a stream and the plan of the stream.

    The split, the partition and the scenario are applied in this order. The partition divides the training samples
    among clients, and the scenario assigns the samples to rounds. Some scenarios replace the split or the partition. If
    the plan has a ``class_order``, the classes of the returned samples are in this order.

    Args:
        samples: All samples.
        scenario: The scenario.
        partition: The partition. None means `IID`.
        division: The split. If None, the test and validation sets of a data module or a dict of splits are used. For
            data without these sets, the defaults of `Split` are used, with a fifth of the samples for testing.
        seed: Seed of all draws.
    """
    if division is None:
        division = Split(
            test="official" if samples.has_client_splits and samples.test is not None else Split.test,
            validation="official" if samples.has_client_splits and samples.validation is not None else Split.validation,
        )
    check_classes(samples, scenario, partition)
    rng, y = np.random.default_rng([seed, 0]), samples.labels
    domains, group = np.unique(samples.group, return_inverse=True) if samples.group is not None else ((), None)
    pool = SamplePool(y, group=group, classes=samples.classes, domains=tuple(map(str, domains)))
    if not scenario.provides_split:
        train, validation, test = division.split_indices(samples, rng)
        pool = replace(pool, train=train, validation=validation, test=test)
    if not scenario.provides_clients:
        owner = samples.client_ids[pool.train] if samples.client_ids is not None else None
        parts = (partition or IID()).partition(y[pool.train], owner, rng)
        counts = np.fromiter(map(len, parts.values()), dtype=np.int64, count=len(parts))
        rows = np.concatenate(list(parts.values())) if parts else EMPTY
        # The samples of all clients share one array. With many clients, separate arrays would use more memory.
        pool = replace(pool, clients=concat_views(list(parts), pool.train[rows], counts))
    plan = scenario.plan(pool, seed)
    if unnamed := [client for client in plan.clients if not client.strip()]:
        number = plan.num_client_samples(unnamed[0])
        raise InvalidValueError(
            f'Expected a name for every client, but got "{unnamed[0]}" for a client with {number} sample(s).',
            hint="Rename the client, or drop these samples.",
            argument="client",
            value=unnamed[0],
        )
    _check_no_leakage(samples, plan, scenario)
    if reserved := {"server", "clients"} & set(plan.clients):
        raise InvalidValueError(
            f'Expected clients not to be named "{reserved.pop()}", which is a reserved name.', argument="client"
        )
    if plan.class_order is not None:
        names = tuple(samples.classes[c] for c in plan.class_order[: plan.num_outputs])
        samples = replace(samples, targets=np.argsort(plan.class_order)[samples.targets], classes=names)
    return samples, plan
