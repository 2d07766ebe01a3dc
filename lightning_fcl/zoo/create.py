"""Networks by name for others' code, with published weights or without, and with heads of their own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from lightning_fcl.errors import at_least, did_you_mean
from lightning_fcl.models.described import Described, rebuild
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.readout import ReservoirReadout
from lightning_fcl.zoo.loading import load, make_network
from lightning_fcl.zoo.pretrained import embed_samples
from lightning_fcl.zoo.registry import find, list_models

# How the networks call the number of their outputs.
_OUTPUTS = ("num_classes", "outputs")


class FeaturesOnly(nn.Module):
    """A network without its head: its outputs are its features."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return embed_samples(self.network, x)


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
    if num_classes is not None:
        at_least(1, num_classes=num_classes)
    if name in import_module("lightning_fcl.models").__all__:
        network = _own(name, pretrained, num_classes, arguments)
    elif arguments:
        raise ValueError(
            f"Expected no further arguments for {name}, which tells its own, but got {', '.join(arguments)}."
        )
    elif pretrained:
        network = _with_head(load(name).network.train().requires_grad_(True), num_classes)
    else:
        network = _with_head(make_network(find(name).entry), num_classes)
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
        raise ValueError(f"Expected the name of a published reservoir but got {name!r}. There are {names}.")
    return network.reservoir


def _own(name: str, pretrained: bool, num_classes: int | None, arguments: dict[str, Any]) -> nn.Module:
    if pretrained:
        known = list_models()
        hint = did_you_mean(name.lower(), known)
        raise ValueError(
            f"Expected the name of published weights but {name} is a class of networks.{hint} Published are "
            f"{', '.join(known)}."
        )
    if num_classes is not None:
        arguments = {**arguments, "num_classes": num_classes}
    network = rebuild({"class_path": f"lightning_fcl.models.{name}", "init_args": arguments}, "model")
    if not isinstance(network, nn.Module):
        raise ValueError(f"Expected the name of a network but {name} makes none.")
    return network


def _with_head(network: nn.Module, num_classes: int | None) -> nn.Module:
    if num_classes is None or not isinstance(network, Described):
        return network
    wanted = _resized(network.described, num_classes)
    if wanted == network.described:
        return network
    other = rebuild(wanted, "model")
    state, published = other.state_dict(), network.state_dict()
    other.load_state_dict({k: published[k] if published[k].shape == v.shape else v for k, v in state.items()})
    assert isinstance(other, nn.Module)
    return other


def _resized(description: dict[str, Any], outputs: int) -> dict[str, Any]:
    arguments = dict(description["init_args"])
    if "network" in arguments:
        arguments["network"] = _resized(arguments["network"], outputs)
    elif "sizes" in arguments:
        arguments["sizes"] = [*arguments["sizes"][:-1], outputs]
    elif name := next((name for name in _OUTPUTS if name in arguments), None):
        arguments[name] = outputs
    else:
        raise ValueError(f"Expected a network with a head but {description['class_path']} tells of none.")
    return {**description, "init_args": arguments}
