"""Avalanche benchmarks, taken apart into samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from lightning_fcl.data.samples import Samples, of_anything


class Labelled(Protocol):
    """What Avalanche's data sets have, and torchvision's."""

    targets: Any

    def __getitem__(self, index: int) -> Any: ...

    def __len__(self) -> int: ...


class Experience(Protocol):
    """One experience of an Avalanche stream."""

    dataset: Labelled


class Benchmark(Protocol):
    """An Avalanche benchmark: its experiences, and what they are tested on."""

    train_stream: Iterable[Experience]
    test_stream: Iterable[Experience]


Experiences = Sequence[Labelled]


class _Pairs(Dataset[tuple[Any, Any]]):
    """The samples and labels of a data set, without Avalanche's task labels."""

    def __init__(self, data: Labelled) -> None:
        self.data = data
        self.targets = [int(label) for label in data.targets]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.data[index][0], self.targets[index]

    def __len__(self) -> int:
        return len(self.targets)


def experiences_of(benchmark: Benchmark | Experiences) -> tuple[Samples, list[list[int]] | None]:
    """The samples of a benchmark, and the classes of its experiences if no class comes in two of them.

    Args:
        benchmark: A benchmark, whose test stream becomes the data's own test set, or a list of data sets.

    Returns:
        The samples, the ``group`` of each being the number of its experience; and the classes of each experience, or
        None where experiences share classes.

    Raises:
        ValueError: If there is no experience.
    """
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
        samples = replace(samples, test=np.arange(len(samples)) >= learnt)
    classes = [sorted(set(data.targets)) for data in train]
    alone = len({label for labels in classes for label in labels}) == sum(map(len, classes))
    return samples, classes if alone else None
