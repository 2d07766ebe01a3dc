"""Low-rank adaptation of linear layers (Hu et al., 2022)."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.readout import EmbedsSamples
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import above, at_least, format_names


class LoRA(Serializable):
    """Low-rank adaptation: linear layers ``W x + alpha / rank * B A x`` with frozen W (Hu et al., 2022).

    ``a.weight`` of shape (rank, inputs) starts at random values, and ``b.weight`` of shape (outputs, rank) starts at
    zero. Therefore, the network's output is unchanged at the start. Only these weights and the parameters that match
    ``head`` are trained. All other parameters are frozen.

    In general, the mean over clients of the products B A differs from the product of the mean B and the mean A. With
    ``train_a=False``, the two are equal, because all clients have the same A. Only B and the head are trained. This is
    FFA-LoRA (Sun et al., 2024). With ``FederatedStrategy(reductions={"model.*.a.weight": "constant"})``, A is not
    uploaded or downloaded, like the frozen weights.

    Args:
        net: A network. The network's linear layers are replaced in place.
        rank: Rank of the added weights, at least 1.
        alpha: Scale of the added weights, above 0.
        head: Shell-style pattern for the names of parameters that are trained directly. All `nn.Linear` layers whose
            weight does not match are adapted.
        train_a: Whether A is trained.

    Raises:
        ValueError: If a number is out of range, ``head`` matches no parameter, or no linear layer is left to adapt.

    Example:
        >>> from lightning_fcl.models import MLP
        >>> model = LoRA(MLP([6, 5, 4]), rank=2, head="3.*", train_a=False)
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['net.1.b.weight', 'net.3.weight', 'net.3.bias']
    """

    citations = ("hu2022lora",)

    def __init__(
        self,
        net: nn.Module,
        rank: int = 8,
        alpha: float = 1.0,
        head: str = "head.*",
        train_a: bool = True,
    ) -> None:
        super().__init__()
        at_least(1, rank=rank)
        above(0, alpha=alpha)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(fnmatchcase(name, head))
        adapted_layers = [
            (name, layer)
            for name, layer in net.named_modules()
            if type(layer) is nn.Linear and not fnmatchcase(f"{name}.weight", head)
        ]
        if not adapted_layers or not any(p.requires_grad for p in net.parameters()):
            raise InvalidValueError(
                "Expected `head` to match parameters of the network, and not to match the weights of all linear "
                f"layers, but got {head} for {format_names((name for name, _ in net.named_parameters()))}.",
                hint='Use a pattern of the last layer, such as `head="head.*"`. An earlier layer must be linear.',
                argument="head",
                value=head,
            )
        for name, layer in adapted_layers:
            net.set_submodule(name, AdaptedLinear(layer, rank, alpha / rank, train_a))
        self.net = net
        if isinstance(net, EmbedsSamples):
            self.features = net.features

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the network."""
        output: Tensor = self.net(x)
        return output

    def embed(self, x: Tensor) -> Tensor:
        """Return the network's features, shape (batch, features)."""
        body: EmbedsSamples = self.net  # type: ignore[assignment]
        return body.embed(x)


class AdaptedLinear(nn.Module):
    """A frozen linear layer plus a low-rank term: ``layer(x) + scale * B A x``. See `LoRA`."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float, train_a: bool) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.a = nn.Linear(layer.in_features, rank, bias=False).to(layer.weight).requires_grad_(train_a)
        self.b = nn.Linear(rank, layer.out_features, bias=False).to(layer.weight)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.scale * self.b(self.a(x))
        return output
