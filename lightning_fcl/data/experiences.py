"""The scenario of an Avalanche benchmark's experiences, and its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from lightning_fcl.data.own import all_seen, of_anything
from lightning_fcl.data.samples import Samples
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental, Scenario, named

if TYPE_CHECKING:
    from avalanche.benchmarks import CLScenario
    from avalanche.benchmarks.utils import AvalancheDataset

Benchmark: TypeAlias = "CLScenario | Sequence[AvalancheDataset]"


class _Pairs(Dataset[tuple[Any, Any]]):
    """The samples and labels of a data set, without Avalanche's task labels."""

    def __init__(self, data: AvalancheDataset) -> None:
        self.data = data
        self.targets = [int(label) for label in data.targets]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.data[index][0], self.targets[index]

    def __len__(self) -> int:
        return len(self.targets)


def experiences_of(benchmark: Benchmark) -> tuple[Samples, list[list[int]] | None]:
    """The samples of a benchmark, their ``group`` the experience; and the classes of each, if no class comes in two."""
    if isinstance(benchmark, Sequence):
        train, test = [_Pairs(data) for data in benchmark], []
    else:
        train, test = (
            [_Pairs(experience.dataset) for experience in stream]
            for stream in (benchmark.train_stream, benchmark.test_stream)
        )
    if not train:
        raise ValueError("Expected at least one experience but got none.")
    group = np.concatenate([np.full(len(data), n) for part in (train, test) for n, data in enumerate(part)])
    samples = of_anything(ConcatDataset([*train, *test]), group=group)
    if test:
        learnt = sum(map(len, train))
        samples = all_seen(replace(samples, test=np.arange(len(samples)) >= learnt), np.arange(len(samples)) < learnt)
    ends = np.cumsum([len(data) for data in train])
    classes = [sorted(set(part.tolist())) for part in np.split(samples.labels[: ends[-1]], ends[:-1])]
    alone = len({label for labels in classes for label in labels}) == sum(map(len, classes))
    return samples, classes if alone else None


def scenario_of(order: Sequence[Sequence[int]] | None, scenario: Scenario | str | None) -> Scenario:
    """The scenario of experiences, with their classes where no class comes twice."""
    default: Scenario = DomainIncremental() if order is None else ClassIncremental()
    scenario = default if scenario is None else named("scenario", scenario, Scenario.__subclasses__())
    if not isinstance(scenario, ClassIncremental) or order is None:
        return scenario
    flat = [label for labels in order for label in labels]
    return replace(scenario, experiences=[len(labels) for labels in order], class_order=flat)


def refuse_dealt(scenario: Scenario, **given: object) -> None:
    """Refuse the ``partition``, ``client`` or ``split`` that a scenario has no use for."""
    for argument, value in given.items():
        dealt, what = (scenario.own_split, "tests") if argument == "split" else (scenario.own_clients, "clients")
        if dealt and value is not None:
            raise ValueError(
                f"Expected no `{argument}` for `{scenario}`, which draws the samples of {what} itself, but got "
                f"{value}. Leave it out."
            )
