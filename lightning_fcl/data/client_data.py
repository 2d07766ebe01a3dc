"""Checks of the data of several clients, before they are joined: sizes, and shapes of their first samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import Dataset, default_collate

from lightning_fcl.data.batches import Collate
from lightning_fcl.data.data_module import Parts
from lightning_fcl.data.generators import Generators


def check_sizes(clients: Mapping[Any, Parts]) -> None:
    """Raise ValueError if a client has no samples."""
    for client, parts in clients.items():
        if not any(len(data) for data, _ in parts.values()):  # type: ignore[arg-type]  # map-style
            raise ValueError(
                f"Expected `data` to have samples of every client, but got none of client {client}. Leave client "
                f"{client} out."
            )


def check_shapes(clients: Mapping[Any, Parts], collate_fn: Collate) -> None:
    """Raise ValueError if torch's `default_collate` cannot make a batch of the samples of several clients.

    The first sample of each dataset is compared.
    """
    if collate_fn is not default_collate or len(clients) < 2:
        return
    first: tuple[Any, dict[str, Any]] | None = None
    for client, parts in clients.items():
        for data, _ in parts.values():
            if not len(data):  # type: ignore[arg-type]  # map-style
                continue
            shapes = dict(_shapes_in(_first_of(data)))
            if first is None:
                first = client, shapes
            for place in first[1].keys() & shapes.keys():
                if first[1][place] != shapes[place]:
                    raise ValueError(
                        f"Expected `data` to have samples of one shape, but got {place} of shape {shapes[place]} from "
                        f"client {client} and {first[1][place]} from client {first[0]}. Convert the samples to one "
                        "shape, or pass a `collate_fn` that makes batches of them."
                    )


def _first_of(data: Dataset[Any]) -> Any:
    with isolate_rng(include_cuda=False), Generators().seeded({"": data}, seed=0):
        return data[0]


def _shapes_in(item: Any, place: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the place and the shape of each array in a sample."""
    if isinstance(item, Mapping):
        for name, part in item.items():
            yield from _shapes_in(part, f"{place}[{name!r}]")
    elif isinstance(item, tuple | list):
        for number, part in enumerate(item):
            yield from _shapes_in(part, f"{place}[{number}]")
    elif isinstance(item, int | float):
        yield f"`sample{place}`", ()
    elif hasattr(item, "shape"):
        yield f"`sample{place}`", tuple(item.shape)
