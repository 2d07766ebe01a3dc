"""The remembered samples that are drawn for each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Declaration, Recalls
from lightning_fcl.methods.step import Step
from lightning_fcl.randomness import Keys, numbers


class Recalled:
    """Draws the remembered samples of each step, for methods that recall some: the same one by one and in cohorts."""

    def __init__(
        self,
        methods: Sequence[Declaration] = (),
        clients: Sequence[Sequence[Client]] = (),
        keys: Callable[[str], Keys] | None = None,
    ) -> None:
        self.pools: dict[str, list[Mapping[str, Tensor]]] = {}
        self._keys: dict[str, Keys] = {}
        self._sizes: dict[str, int] = {}
        self._drawn: Counter[str] = Counter()
        for i, method in enumerate(methods):
            if keys is not None and isinstance(method, Recalls):
                self.pools[method.section] = [method.recall(each[i]) for each in clients]
                self._keys[method.section] = keys(method.section)
                self._sizes[method.section] = method.recall_size

    def draw(self, section: str) -> list[dict[str, Tensor]]:
        """For each client the samples of its next step, by name; none where nothing is remembered yet."""
        pools, size = self.pools[section], self._sizes[section]
        there = np.array([min((len(values) for values in pool.values()), default=0) for pool in pools])
        drawn = numbers(self._keys[section], size, start=self._drawn[section] * size)
        self._drawn[section] += 1
        rows = torch.from_numpy((drawn % np.maximum(there, 1).astype(np.uint64)[:, None]).astype(np.int64))
        return [
            {name: values[row.to(values.device)] for name, values in pool.items()} if number else {}
            for pool, row, number in zip(pools, rows, there, strict=True)
        ]

    def step(self, method: Declaration, step: Step) -> Step:
        """A step of the only client with the samples of a method."""
        if method.section not in self.pools:
            return step
        (drawn,) = self.draw(method.section)
        return replace(step, recalled=drawn, recalled_weight=float(bool(drawn)))
