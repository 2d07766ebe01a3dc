"""A published network that converts raw values of a device, and predicts class names."""

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
    """Prediction for a sample.

    Args:
        label: Name of the most probable class.
        probability: Probability of this class.
        probabilities: Probabilities of all classes by name, in descending order.
    """

    label: str
    probability: float
    probabilities: dict[str, float]


class PretrainedModel(nn.Module):
    """A published network as a plain module that also accepts raw samples and predicts class names.

    Args:
        network: The network with its weights. Its parameters are frozen.
        entry: Description of the network.

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
        """Names of the classes, in the order of the outputs."""
        return self.entry.classes

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs for samples that `preprocess` has converted."""
        outputs: Tensor = self.network(x)
        return outputs

    def preprocess(self, x: Any, rate: float | None = None, units: Sequence[str] | str | None = None) -> Tensor:
        """Convert raw values of a device to samples as the network expects them, shape (n, ...).

        Args:
            x: One or more samples: an array, a tensor or nested lists. If the entry scales samples per person (see
                ``entry.measurement``), pass samples of one person.
            rate: Sampling rate of the values in Hz. It is compared with the rate of ``entry.measurement`` if both are
                given.
            units: Unit of each channel, or one unit for all channels. The units are compared with the units of
                ``entry.measurement``, unless ``units`` or the measurement is None.

        Raises:
            ValueError: If the shape, rate, units or values do not match the entry.
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
                    f"Expected `x` to have the shape {shape}, or (n, ...) for n samples, but got {values.shape}.",
                    argument="x",
                    value=values.shape,
                )
            if prepared.dtype.kind == "f" and not np.isfinite(prepared).all():
                raise InvalidValueError(
                    "Expected `x` to be finite, but got NaN or infinite values.",
                    hint="Replace these values, or drop these samples.",
                    argument="x",
                )
        tensor = torch.from_numpy(np.ascontiguousarray(prepared)).to(weight.device)
        return tensor.to(weight.dtype) if tensor.is_floating_point() else tensor

    @torch.no_grad()
    def predict(
        self, x: Any, sampling_rate_hz: float | None = None, units: Sequence[str] | str | None = None
    ) -> list[Prediction]:
        """Predict the class of each sample. The arguments are those of `preprocess`. ``sampling_rate_hz`` is ``rate``.

        The probabilities of a least-squares readout are the outputs, clipped at 0 and divided by their sum. If no
        output is above 0, all classes have the same probability. Outputs that estimate -1 and 1 are first mapped so
        that -1 becomes 0 and 1 stays 1. These probabilities are not calibrated. If a readout has outputs for each time
        step, the mean over time steps is used.

        Raises:
            ValueError: If the samples do not match the entry, or the entry has no class names.
        """
        if not self.entry.classes:
            raise InvalidValueError(
                f"Expected a network with class names, but {self.entry.name} was published without class names.",
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
        """Return the features of raw samples, shape (n, features). The arguments are those of `predict`.

        Raises:
            ValueError: If the samples do not match the entry, or the network has no features.
        """
        return embed_samples(self.network, self.preprocess(x, sampling_rate_hz, units))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the classes for outputs of the network, shape (n, classes), float64."""
        outputs = outputs.double()
        outputs = outputs.mean(dim=1) if outputs.dim() == 3 else outputs
        if self.entry.output_kind == "logits":
            return outputs.softmax(dim=-1)
        shares = ((outputs + 1) / 2 if self.entry.output_kind == "-1/1" else outputs).clamp(min=0)
        total = shares.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, shares / total.clamp(min=1e-300), 1 / outputs.shape[-1])

    def extra_repr(self) -> str:
        """Return the name and the version of the network for printing."""
        return self.entry.full_name


def embed_samples(network: nn.Module, x: Tensor) -> Tensor:
    """Return a network's features of prepared samples, shape (n, features). Features of time steps are averaged."""
    embed = getattr(network, "embed", None)
    if embed is None:
        raise InvalidValueError(
            f"Expected a network with features from `embed(x)`, but {type(network).__name__} has no `embed`."
        )
    features: Tensor = embed(x)
    return features.mean(dim=1) if features.dim() == 3 else features


def read_samples(path: Path, entry: ModelEntry) -> NDArray[Any]:
    """Read raw samples of a CSV file for an entry.

    For time series, a line is a time step and a column is a channel. Consecutive lines form samples with the number of
    time steps of the entry. If a line contains all values of a sample, each line is a sample. A first line without
    numbers is treated as a header.

    Returns:
        An array of shape (n, ...), as accepted by `PretrainedModel.predict`.

    Raises:
        ValueError: If the content of the file does not match the entry.
        FileNotFoundError: If there is no such file.
    """
    if not path.is_file():
        raise MissingFileError(f"Expected a CSV file at {path}, but the file does not exist.")
    try:
        lines = [line for line in read_text(path, "utf-8-sig").splitlines() if line.strip()]
        heading = bool(lines) and not any(map(_is_number, lines[0].split(",")))
        table = np.empty((0, 0))
        if numbers := lines[heading:]:
            table = np.loadtxt(numbers, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as error:
        raise InvalidValueError(
            f"Expected {path} to contain numbers, with the same number of columns in each line, but got: "
            f"{first_line(error)}.",
            hint="Correct the file. A row number in this message does not count empty lines and the header line.",
        ) from error
    shape, axes, channels = tuple(entry.input_shape), tuple[str, ...](), tuple[str, ...]()
    if entry.measurement is not None and "time" in entry.measurement.axes:
        axes, channels = entry.measurement.axes, entry.measurement.channels
    if axes and table.shape[1] == len(channels):
        steps = shape[axes.index("time")]
        if len(table) % steps:
            raise InvalidValueError(
                f"Expected {path} to have {steps} lines for each sample, but the number of lines is {len(table)}. The "
                "last sample is incomplete.",
                hint="Delete the lines of the last sample, or add the missing lines.",
            )
        series = table.reshape(-1, steps, len(channels))
        return series if axes.index("time") == 0 else series.transpose(0, 2, 1)
    if table.shape[1] != prod(shape):
        or_so = f"{len(channels)} columns ({', '.join(channels)}) with one line per time step, or " if channels else ""
        raise InvalidValueError(
            f"Expected {path} to have {or_so}{prod(shape)} columns with one line per sample, but got {table.shape[1]} "
            f"column{'' if table.shape[1] == 1 else 's'}."
        )
    return table.reshape(-1, *shape)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
