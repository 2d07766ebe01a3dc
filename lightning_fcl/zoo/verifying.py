"""Published networks are compared with what their cards say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.zoo.entry import CHECK
from lightning_fcl.zoo.loading import TOLERANCE, compare, load_folder, read_tensors
from lightning_fcl.zoo.pretrained import Pretrained
from lightning_fcl.zoo.recipe import UnknownRecipeError, recipe_parts
from lightning_fcl.zoo.registry import folder_of

SHARE = 1e-3
"""The share of test samples that may be told otherwise than the card says: processors round otherwise."""

_BATCH = 512


@dataclass(frozen=True)
class Verdict:
    """What came of a comparison.

    Args:
        name: The entry's.
        right: Whether it is what its card says.
        card: The accuracy on the test samples by the card, or None where none was measured.
        measured: That which was measured now, or None: ``why`` tells.
        difference: From the published outputs of the published input, by the largest of these.
        why: Why the accuracy was not measured; empty if it was.
    """

    name: str
    right: bool
    card: float | None
    measured: float | None
    difference: float
    why: str = ""


def verify(name: str | Path) -> Verdict:
    """Compare a published network with its card: on its data where they are, and on the published input.

    Raises:
        ValueError: If a file is damaged, or does not fit.
        FileNotFoundError: If a file is missing.

    Example:
        >>> verdict = verify("mlp.digits.flwf2t_replay")
        >>> verdict.right, verdict.card == verdict.measured
        (True, True)
    """
    folder = folder_of(name)
    model = load_folder(folder, check=False)
    entry = model.entry
    difference = compare(model, read_tensors(folder / CHECK)) if (folder / CHECK).is_file() else 0.0
    card, measured, why = entry.metrics.get("test_accuracy"), None, ""
    if card is None:
        why = "it names no classes"
    else:
        try:
            stream = recipe_parts(entry.recipe, entry.full_name).datamodule
            stream.setup("test")
            measured = test_accuracy(model, stream)
        except (FileNotFoundError, UnknownRecipeError) as error:
            why = str(error)
    right = difference <= TOLERANCE and (measured is None or abs(measured - (card or 0)) <= SHARE)
    return Verdict(entry.full_name, right, card, measured, difference, why)


@torch.no_grad()
def test_accuracy(model: Pretrained, stream: FederatedStream) -> float:
    """The share of a stream's test samples, or of their steps, whose class a network tells."""
    right = total = 0
    for rows in torch.split(torch.from_numpy(stream.plan.test), _BATCH):
        x, y = stream.take(rows.numpy())
        predicted = model(x).argmax(dim=-1)
        labels: Tensor = y[:, None].expand_as(predicted) if predicted.dim() > 1 else y
        right += int((predicted == labels).sum())
        total += labels.numel()
    return right / total
