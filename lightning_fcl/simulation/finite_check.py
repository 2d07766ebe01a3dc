"""Search for samples with non-finite values, to name the cause of a dropped upload."""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fcl.data.batching import fetch
from lightning_fcl.data.reading_check import restored_reading
from lightning_fcl.data.samples import Joined
from lightning_fcl.data.stream import FederatedStream

log = logging.getLogger(__name__)


def warn_of_non_finite_samples(stream: FederatedStream, client: str, round_idx: int) -> None:
    """Log a warning if samples that a client reads from a dataset in a round have NaN or infinite values.

    Samples in memory are not searched, because they are finite.
    """
    samples, rows = stream.samples, stream.plan.train[round_idx][client]
    if not samples.is_random:
        return
    is_wrong = []
    with isolate_rng(include_cuda=False), restored_reading(samples, rows, "train"):
        for row in rows.tolist():
            with samples.seeded([row], "train", stream.seed):
                is_wrong.append(any(map(_is_non_finite, tree_leaves(fetch(samples.x, [row])))))
    if not any(is_wrong):
        return
    first = int(rows[is_wrong.index(True)])
    log.warning(
        "%d of %d training samples of client %s have NaN or infinite values, for example sample %d of its dataset. "
        "Fill in the values, for example with `lightning_fcl.data.preprocessing.TablePreprocessor`, or remove the "
        "samples.",
        sum(is_wrong),
        len(rows),
        client,
        samples.x.place_of(first)[1] if isinstance(samples.x, Joined) else first,
    )


def _is_non_finite(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and not bool(torch.isfinite(value).all())
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and not bool(np.isfinite(value).all())
