"""The remembered samples that are drawn for each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.declaration import Declaration, overrides
from lightning_fcl.methods.step import Step


class Recalls:
    """Draws the remembered samples of each step, for the methods that recall some: the same one by one and in cohorts.

    Args:
        pools: For each section, what its method remembers.
        sizes: For each section, how many samples are drawn.
        generator: Draws them; one for each client and round.
    """

    def __init__(
        self,
        pools: Mapping[str, Mapping[str, Tensor]] | None = None,
        sizes: Mapping[str, int] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.pools = pools or {}
        self.sizes = sizes or {}
        self.generator = generator

    @classmethod
    def of(cls, methods: Sequence[Declaration], memories: Sequence[Memory], seed: Callable[[], int]) -> Recalls:
        """The recalls of a client with some memories; the seed is asked for where a method recalls any samples."""
        pools, sizes = {}, {}
        for method, memory in zip(methods, memories, strict=True):
            if method.recall_size and overrides(method, "recall"):
                pools[method.section], sizes[method.section] = method.recall(memory), method.recall_size
        return cls(pools, sizes, torch.Generator().manual_seed(seed())) if pools else cls()

    def draw(self, section: str) -> dict[str, Tensor]:
        """The samples of one step of a section, by name; none where nothing is remembered yet."""
        pool = self.pools.get(section, {})
        number = min((len(values) for values in pool.values()), default=0)
        if not number:
            return {}
        rows = torch.randint(number, (self.sizes[section],), generator=self.generator)
        return {name: values[rows.to(values.device)] for name, values in pool.items()}

    def step(self, method: Declaration, step: Step) -> Step:
        """A step with the samples of a method."""
        if method.section not in self.pools:
            return step
        drawn = self.draw(method.section)
        return replace(step, recalled=drawn, recalled_weight=float(bool(drawn)))
