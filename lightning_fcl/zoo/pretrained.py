"""A published network with all that makes class names of a device's own values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.io.reading import read_text
from lightning_fcl.library_errors import first_line
from lightning_fcl.zoo.model_entry import ModelEntry


@dataclass(frozen=True)
class Prediction:
    """What a sample is taken for.

    Args:
        label: The name of the class.
        probability: Its probability.
        probabilities: That of each class, the likeliest first.
    """

    label: str
    probability: float
    probabilities: dict[str, float]


class PretrainedModel(nn.Module):
    """A published network: a plain module that also takes raw samples and names classes.

    Args:
        network: The network, with its weights.
        entry: What is said of it.

    Example:
        >>> from lightning_fcl.models import MLP
        >>> entry = ModelEntry("mlp.two", 1, "Two numbers.", {}, "logits", ["less", "more"], [2])
        >>> model = PretrainedModel(MLP([2, 2]), entry)
        >>> _ = nn.init.eye_(model.network[1].weight), nn.init.zeros_(model.network[1].bias)
        >>> model.predict([0.0, 2.0])[0].label
        'more'
    """

    def __init__(self, network: nn.Module, entry: ModelEntry) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.entry = entry
        self.eval()

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of the outputs."""
        return self.entry.classes

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs of samples as it takes them: see `preprocess`."""
        outputs: Tensor = self.network(x)
        return outputs

    def preprocess(self, x: Any, rate: float | None = None, units: Sequence[str] | str | None = None) -> Tensor:
        """Samples as the network takes them, shape (n, ...), from a device's own values.

        Args:
            x: One sample, or several: an array, a tensor or nested lists. Of one person's where they are scaled by
                person: `Entry.measurement` tells.
            rate: Their time steps per second, to compare.
            units: The unit of each channel, to compare.

        Raises:
            ValueError: If shape, rate, units or values are not those of the entry.
        """
        values = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        weight = next(self.network.parameters(), torch.empty(0))
        if self.entry.measurement is not None:
            prepared = self.entry.measurement.preprocess(values, rate, units)
        else:
            shape = tuple(self.entry.input_shape)
            prepared = values[np.newaxis] if values.shape == shape else values
            if prepared.shape[1:] != shape or not len(prepared):
                raise InvalidValueError(
                    f"Expected `x` of shape {shape}, or (n, ...) of several, but got {values.shape}.",
                    argument="x",
                    value=values.shape,
                )
            if prepared.dtype.kind == "f" and not np.isfinite(prepared).all():
                raise InvalidValueError(
                    "Expected `x` to be finite but got NaN or infinite values.",
                    hint="Replace these values, or drop these samples.",
                    argument="x",
                )
        tensor = torch.from_numpy(np.ascontiguousarray(prepared)).to(weight.device)
        return tensor.to(weight.dtype) if tensor.is_floating_point() else tensor

    @torch.no_grad()
    def predict(
        self, x: Any, sampling_rate_hz: float | None = None, units: Sequence[str] | str | None = None
    ) -> list[Prediction]:
        """The class of each sample; arguments are those of `preprocess`.

        The probabilities of a readout that was solved for by least squares are its outputs, cut at 0 and divided by
        their sum: an estimate of theirs, not a calibrated one. Where a readout speaks at each time step, its mean over
        the steps counts.

        Raises:
            ValueError: As there, or if the entry names no classes.
        """
        if not self.entry.classes:
            raise InvalidValueError(
                f"Expected a network that names classes but {self.entry.name} gives features.",
                hint="Use `embed`, or add a head with `create_model(name, pretrained=True, num_classes=...)`.",
                argument="classes",
                value=self.entry.name,
            )
        rows = self.probabilities(self(self.preprocess(x, sampling_rate_hz, units))).tolist()
        predictions = []
        for row in rows:
            by_class = sorted(zip(self.classes, row, strict=True), key=lambda pair: -pair[1])
            predictions.append(Prediction(*by_class[0], dict(by_class)))
        return predictions

    @torch.no_grad()
    def embed(self, x: Any, sampling_rate_hz: float | None = None, units: Sequence[str] | str | None = None) -> Tensor:
        """Features of raw samples.

        Raises:
            ValueError: As `preprocess` does, or if the network tells no features.
        """
        return embed_samples(self.network, self.preprocess(x, sampling_rate_hz, units))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of each class, shape (n, classes), float64, by the network's outputs."""
        outputs = outputs.double()
        outputs = outputs.mean(dim=1) if outputs.dim() == 3 else outputs
        if self.entry.output_kind == "logits":
            return outputs.softmax(dim=-1)
        shares = ((outputs + 1) / 2 if self.entry.output_kind == "-1/1" else outputs).clamp(min=0)
        total = shares.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, shares / total.clamp(min=1e-300), 1 / outputs.shape[-1])

    def extra_repr(self) -> str:
        """Name and version, for printing."""
        return self.entry.full_name


def embed_samples(network: nn.Module, x: Tensor) -> Tensor:
    """Features of prepared samples, shape (n, features)."""
    embed = getattr(network, "embed", None)
    if embed is None:
        raise InvalidValueError(
            f"Expected a network that has features, by `embed(x)`, but {type(network).__name__} has none."
        )
    features: Tensor = embed(x)
    return features.mean(dim=1) if features.dim() == 3 else features


def read_samples(path: Path, entry: ModelEntry) -> NDArray[Any]:
    """The raw samples of a CSV file, for an entry.

    Of a series, a line is a time step and a column a channel: as many lines as a sample has steps are one, and lines
    that are left over are refused. Else a line is a sample, with all of its numbers in their order. A first line
    without numbers is a heading.

    Returns:
        Shape (n, ...), as `PretrainedModel.predict` takes it.
    """
    if not path.is_file():
        raise MissingFileError(f"Expected a CSV file at {path} but found none.")
    try:
        lines = [line for line in read_text(path, "utf-8-sig").splitlines() if line.strip()]
        heading = bool(lines) and not any(map(_is_number, lines[0].split(",")))
        table = np.empty((0, 0))
        if numbers := lines[heading:]:
            table = np.loadtxt(numbers, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as error:
        raise InvalidValueError(
            f"Expected {path} to hold numbers, as many in each line, but got: {first_line(error)}.",
            hint="Correct this line of the file.",
        ) from error
    shape, axes, channels = tuple(entry.input_shape), tuple[str, ...](), tuple[str, ...]()
    if entry.measurement is not None and "time" in entry.measurement.axes:
        axes, channels = entry.measurement.axes, entry.measurement.channels
    if axes and table.shape[1] == len(channels):
        steps = shape[axes.index("time")]
        if len(table) % steps:
            raise InvalidValueError(
                f"Expected {path} to have {steps} lines for each sample but got {len(table)}, which leaves "
                f"{len(table) % steps} over.",
                hint="Delete these lines.",
            )
        series = table.reshape(-1, steps, len(channels))
        return series if axes.index("time") == 0 else series.transpose(0, 2, 1)
    if table.shape[1] != prod(shape):
        or_so = f"{len(channels)} columns ({', '.join(channels)}), a line each time step, or " if channels else ""
        raise InvalidValueError(
            f"Expected {path} to have {or_so}{prod(shape)} columns, a line each sample, but got {table.shape[1]}."
        )
    return table.reshape(-1, *shape)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
