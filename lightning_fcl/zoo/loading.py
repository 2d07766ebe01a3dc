"""Published networks come in: by name, from a folder, from afar; nothing is trusted before it is verified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fcl.federation.aggregation import check_state
from lightning_fcl.models.described import rebuild
from lightning_fcl.zoo.entry import CHECK, WEIGHTS, Entry, read_folder
from lightning_fcl.zoo.pretrained import Pretrained, embed_samples
from lightning_fcl.zoo.registry import folder_of

TOLERANCE = 1e-3
"""How far outputs may be from the published ones, by the largest of these: CPUs round otherwise."""


def load(name: str | Path, model: nn.Module | None = None, check: bool = True) -> Pretrained:
    """A published network, its files verified, in evaluation mode.

    Args:
        name: ``"har_cnn.ucihar.flwf2t_ft"``, the newest version, or one of them as in ``"...@1"``; a folder; or
            ``"hf:organisation/repository@commit"``.
        model: The network, where it is of a class that is not of `lightning_fcl.models`: its weights are replaced.
        check: Whether the published input must come out as it was published.

    Raises:
        ValueError: If nothing is known by that name, a file is damaged, or does not fit the network.
        FileNotFoundError: If a file is missing.
        ConnectionError: If it cannot be downloaded.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> model = load("mlp.digits.flwf2t_replay")
        >>> model.predict(load_digits().images[:1, None])[0].label
        '0'
    """
    return load_folder(folder_of(name), model, check)


def load_folder(folder: Path, model: nn.Module | None = None, check: bool = True) -> Pretrained:
    entry = read_folder(folder)
    network = make_network(entry, model)
    fill(network, read_tensors(folder / WEIGHTS), entry)
    pretrained = Pretrained(network, entry)
    if check and (folder / CHECK).is_file():
        difference = compare(pretrained, read_tensors(folder / CHECK))
        if not difference <= TOLERANCE:
            raise ValueError(
                f"Expected {entry.full_name} to give the published outputs of the published input but they differ by "
                f"{difference:.2g} of the largest. Report it, with your torch and processor; check=False loads it."
            )
    return pretrained


def make_network(entry: Entry, model: nn.Module | None = None) -> nn.Module:
    """The network of an entry, before its weights."""
    if model is not None:
        return model
    with torch.random.fork_rng(devices=[]):  # weights are drawn, and then replaced
        network = rebuild(entry.network, "model")
    if not isinstance(network, nn.Module):
        raise ValueError(f"Expected {entry.full_name} to describe a network but got {entry.network!r}.")
    return network


def fill(network: nn.Module, tensors: Mapping[str, Tensor], entry: Entry) -> None:
    """Put weights, perhaps of half precision, into a network: each that it has, and no other."""
    whole = {name: value.float() if value.dtype == torch.half else value for name, value in tensors.items()}
    try:
        check_state(network, whole)
    except ValueError as error:
        raise ValueError(f"Expected the weights of {entry.full_name} to fit its network. {error}") from error
    network.load_state_dict(whole)


@torch.no_grad()
def compare(model: Pretrained, published: Mapping[str, Tensor]) -> float:
    """The largest difference from the published outputs of the published input, by the largest of these."""
    found = features_or_outputs(model, published["input"]).double()
    wanted = published["output"].double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def features_or_outputs(model: Pretrained, x: Tensor) -> Tensor:
    """What an entry's check holds: outputs, or features where it names no classes."""
    return model(x) if model.classes else embed_samples(model.network, x)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"Expected {path} to hold tensors but got: {error}. Get it again.") from error
