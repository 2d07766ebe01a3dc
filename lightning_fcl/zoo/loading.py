"""Published networks come in: by name, from a folder, from afar; nothing is trusted before it is verified."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.federation.aggregation import check_state
from lightning_fcl.io.reading import REDOWNLOAD_HINT, regular_file
from lightning_fcl.models.backbone import packaged_state
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.readout import ReservoirReadout
from lightning_fcl.models.serialization import Serializable, build_from_config
from lightning_fcl.validation import at_least, check_arguments, did_you_mean
from lightning_fcl.zoo.model_entry import CHECK, WEIGHTS, ModelEntry, read_folder
from lightning_fcl.zoo.pretrained import PretrainedModel, embed_samples
from lightning_fcl.zoo.registry import get_entry, list_models, resolve_folder

TOLERANCE = 1e-3
"""How far outputs may be from the published ones, by the largest of these: CPUs round otherwise."""


class FeaturesOnly(nn.Module):
    """A network without its head: its outputs are its features."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return embed_samples(self.network, x)


def load(name: str | Path, model: nn.Module | None = None, check: bool = True) -> PretrainedModel:
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
    return load_folder(resolve_folder(name), model, check)


@check_arguments
def create_model(
    name: str,
    pretrained: bool = False,
    num_classes: int | None = None,
    features_only: bool = False,
    **arguments: Any,
) -> nn.Module:
    """A network by name, to train on: of the zoo, or of `lightning_fcl.models`.

    Args:
        name: Of a published network, as `lightning_fcl.zoo.load` takes it, or of a class of `lightning_fcl.models`.
        pretrained: Whether with the published weights; else they are drawn anew.
        num_classes: Number of outputs; where it is not the published one, the head is new, its weights drawn. None: as
            it was published.
        features_only: Whether the outputs are features.
        arguments: Arguments of the class, where it is one of `lightning_fcl.models`.

    Raises:
        ValueError: If nothing is known by that name, it has no published weights, or does not take as many classes.

    Example:
        >>> import torch
        >>> create_model("mlp.digits.flwf2t_replay", pretrained=True, num_classes=3)(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 3])
    """
    at_least(1, num_classes=1 if num_classes is None else num_classes)
    if name in import_module("lightning_fcl.models").__all__:
        if pretrained:
            model_names = list_models()
            hint = did_you_mean(name.lower(), model_names)
            raise UnknownNameError(
                f"Expected the name of published weights but {name} is a class of networks.",
                hint=f"{hint} Use one of the published names: {', '.join(model_names)}.",
                argument="name",
                value=name,
            )
        if num_classes is not None:
            arguments["num_classes"] = num_classes
        network = build_from_config({"class_path": f"lightning_fcl.models.{name}", "init_args": arguments}, "model")
    elif arguments:
        raise InvalidValueError(
            f"Expected no further arguments for {name}, which tells its own, but got {', '.join(arguments)}.",
            argument=next(iter(arguments)),
            value=next(iter(arguments.values())),
        )
    else:
        network = load(name).network.train().requires_grad_(True) if pretrained else make_network(get_entry(name).entry)
        if num_classes is not None and isinstance(network, Serializable):
            network = _with_head(network, num_classes)
    return FeaturesOnly(network) if features_only else network


def pretrained_reservoir(name: str) -> EchoStateNetwork:
    """The reservoir of a published network, for a readout of one's own.

    Raises:
        ValueError: If nothing is known by that name, or it has no reservoir.

    Example:
        >>> pretrained_reservoir("esn.wesad_wrist.fedip").features
        300
    """
    network = load(name).network
    if not isinstance(network, ReservoirReadout):
        names = ", ".join(list_models("esn.*"))
        raise InvalidValueError(
            f"Expected the name of a published reservoir but got {name!r}.",
            hint=f"Use one of {names}.",
            argument="name",
            value=name,
        )
    return network.reservoir


def load_folder(folder: Path, model: nn.Module | None = None, check: bool = True) -> PretrainedModel:
    entry = read_folder(folder)
    pretrained = load_weights(make_network(entry) if model is None else model, read_tensors(folder / WEIGHTS), entry)
    if check and (folder / CHECK).is_file():
        difference = relative_output_difference(pretrained, read_tensors(folder / CHECK))
        if not difference <= TOLERANCE:
            raise InvalidValueError(
                f"Expected {entry.full_name} to give the published outputs of the published input but they differ by "
                f"{difference:.2g} of the largest.",
                hint="Report it as an issue, with your torch version and processor, or load it with `check=False`.",
                argument="check",
                value=difference,
            )
    return pretrained


def make_network(entry: ModelEntry) -> nn.Module:
    """The network of an entry, before its weights."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn, and then replaced
        network = build_from_config(entry.network, "model")
    if not isinstance(network, nn.Module):
        raise InvalidValueError(f"Expected {entry.full_name} to describe a network but got {entry.network!r}.")
    return network


def load_weights(network: nn.Module, tensors: Mapping[str, Tensor], entry: ModelEntry) -> PretrainedModel:
    """A network with weights of a file, perhaps of half precision: each that no package has brought, and no other."""
    whole = {name: value.float() if value.dtype == torch.half else value for name, value in tensors.items()}
    whole |= packaged_state(network)
    check_state(network, whole)
    network.load_state_dict(whole)
    return PretrainedModel(network, entry)


@torch.no_grad()
def relative_output_difference(model: PretrainedModel, published: Mapping[str, Tensor]) -> float:
    """The largest difference from the published outputs of the published input, by the largest of these."""
    actual_output = features_or_outputs(model, published["input"]).double()
    expected_output = published["output"].double()
    return float((actual_output - expected_output).abs().max() / expected_output.abs().max().clamp(min=1e-12))


def features_or_outputs(model: PretrainedModel, x: Tensor) -> Tensor:
    """What an entry's check holds: outputs, or features where it names no classes."""
    return model(x) if model.classes else embed_samples(model.network, x)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(regular_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidValueError(
            f"Expected {path} to hold tensors but got: {error}.", hint=REDOWNLOAD_HINT, value=path
        ) from error


def _with_head(network: Serializable, num_classes: int) -> nn.Module:
    """The network, or where it has another number of outputs, one with a new head and the same state before it."""
    resized_config = _resized(network.init_config, num_classes)
    if resized_config == network.init_config:
        return network
    other: nn.Module = build_from_config(resized_config, "model")
    state, published = other.state_dict(), network.state_dict()
    other.load_state_dict({k: published[k] if published[k].shape == v.shape else v for k, v in state.items()})
    return other


def _resized(description: dict[str, Any], outputs: int) -> dict[str, Any]:
    arguments = dict(description["init_args"])
    if "network" in arguments:
        arguments["network"] = _resized(arguments["network"], outputs)
    elif "sizes" in arguments:
        arguments["sizes"] = [*arguments["sizes"][:-1], outputs]
    elif name := next((name for name in ("num_classes", "outputs") if name in arguments), None):
        arguments[name] = outputs
    else:
        raise InvalidValueError(f"Expected a network with a head but {description['class_path']} tells of none.")
    return {**description, "init_args": arguments}
