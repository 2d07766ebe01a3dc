"""Loading of published networks by name, from a folder or from a server. All files are verified before use."""

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
"""Largest allowed difference from the published outputs, relative to the largest output. CPUs differ in rounding."""


class FeaturesOnly(nn.Module):
    """A wrapper of a network that outputs the features of the network, without the head."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return embed_samples(self.network, x)


def load(name: str | Path, model: nn.Module | None = None, check: bool = True) -> PretrainedModel:
    """Load a published network in evaluation mode, and verify its files.

    Args:
        name: Name such as ``"har_cnn.ucihar.flwf2t_ft"`` for the newest version, or ``"...@1"`` for a version. A folder
            and ``"hf:organization/repository@commit"`` are also accepted.
        model: Network to load the weights into, if the class of the network is not in `lightning_fcl.models`.
        check: Whether to compare the outputs for the published input with the published outputs.

    Raises:
        ValueError: If the name is unknown, a file is damaged, or the weights do not match the network. Also if
            ``check`` is set and the outputs differ from the published outputs.
        FileNotFoundError: If a file is missing.
        ConnectionError: If a download fails.

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
    """Create a network for training from a name in the zoo, or from a class name in `lightning_fcl.models`.

    Args:
        name: Name of a published network, as in `lightning_fcl.zoo.load`, or of a class in `lightning_fcl.models`.
        pretrained: Whether to load the published weights. Otherwise weights are random.
        num_classes: Number of outputs. If this number differs from the published number, the head is new and has random
            weights. None: the published number, or the default of the class.
        features_only: Whether the network outputs features instead of logits.
        arguments: Arguments of the class in `lightning_fcl.models`.

    Raises:
        ValueError: If the name is unknown or has no published weights, or if the network does not support the number of
            classes.

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
                f"Expected the name of published weights, but {name} is a network class without published weights.",
                hint=f"{hint} Use one of the published names: {', '.join(model_names)}.",
                argument="name",
                value=name,
            )
        if num_classes is not None:
            arguments["num_classes"] = num_classes
        network = build_from_config({"class_path": f"lightning_fcl.models.{name}", "init_args": arguments}, "model")
    elif arguments:
        raise InvalidValueError(
            f"Expected no other arguments for {name}, whose arguments are published, but got {', '.join(arguments)}.",
            argument=next(iter(arguments)),
            value=next(iter(arguments.values())),
        )
    else:
        network = load(name).network.train().requires_grad_(True) if pretrained else make_network(get_entry(name).entry)
        if num_classes is not None and isinstance(network, Serializable):
            network = _with_head(network, num_classes)
    return FeaturesOnly(network) if features_only else network


def pretrained_reservoir(name: str) -> EchoStateNetwork:
    """Return the reservoir of a published network, to train your own readout on it.

    Raises:
        ValueError: If the name is unknown, or the network has no reservoir.

    Example:
        >>> pretrained_reservoir("esn.wesad_wrist.fedip").features
        300
    """
    network = load(name).network
    if not isinstance(network, ReservoirReadout):
        names = ", ".join(list_models("esn.*"))
        raise InvalidValueError(
            f"Expected the name of a published reservoir, but got {name!r}.",
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
                f"Expected {entry.full_name} to return the published outputs for the published input, but the outputs "
                f"differ by {difference:.2g}, relative to the largest output.",
                hint="Report an issue that states your torch version and your processor, or load the network with "
                "`check=False`.",
                argument="check",
                value=difference,
            )
    return pretrained


def make_network(entry: ModelEntry) -> nn.Module:
    """Return the network of an entry with random weights."""
    # The initialization draws random weights. The global generator must not change.
    with torch.random.fork_rng(devices=[]):
        network = build_from_config(entry.network, "model")
    if not isinstance(network, nn.Module):
        raise InvalidValueError(f"Expected {entry.full_name} to describe a network, but got {entry.network!r}.")
    return network


def load_weights(network: nn.Module, tensors: Mapping[str, Tensor], entry: ModelEntry) -> PretrainedModel:
    """Load weights into a network, and return the network as a `PretrainedModel`.

    ``tensors`` must contain all weights that no installed package provides. Weights in half precision are converted to
    single precision.
    """
    whole = {name: value.float() if value.dtype == torch.half else value for name, value in tensors.items()}
    whole |= packaged_state(network)
    check_state(network, whole)
    network.load_state_dict(whole)
    return PretrainedModel(network, entry)


@torch.no_grad()
def relative_output_difference(model: PretrainedModel, published: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a model's outputs from the published outputs.

    The difference is relative to the largest absolute value of the published outputs.
    """
    actual_output = features_or_outputs(model, published["input"]).double()
    expected_output = published["output"].double()
    return float((actual_output - expected_output).abs().max() / expected_output.abs().max().clamp(min=1e-12))


def features_or_outputs(model: PretrainedModel, x: Tensor) -> Tensor:
    """Return the values for the comparison with an entry: outputs, or features if the entry has no class names."""
    return model(x) if model.classes else embed_samples(model.network, x)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(regular_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidValueError(
            f"Expected {path} to contain tensors, but got: {error}.", hint=REDOWNLOAD_HINT, value=path
        ) from error


def _with_head(network: Serializable, num_classes: int) -> nn.Module:
    """Return a network, or a copy with a new head if the network does not have ``num_classes`` outputs."""
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
    elif name := next((name for name in ("num_classes", "num_outputs") if name in arguments), None):
        arguments[name] = outputs
    else:
        raise InvalidValueError(f"Expected a network with a head, but {description['class_path']} has no head.")
    return {**description, "init_args": arguments}
