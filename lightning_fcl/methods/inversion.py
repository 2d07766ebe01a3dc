"""What a sample's gradient tells of the sample: a small network's, sent by clients, and the sample rebuilt of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.federation.reductions import Accumulator, Gather, Reduction, filled_rows


class Rows(Reduction):
    """The reduction of rows of which the server takes those that are not zero, of all clients, one behind the other."""

    name = "rows"
    down = False

    def start(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def wire_bytes(self, value: Tensor) -> int:
        return int(value.any(dim=1).sum()) * value[:1].nbytes

    def accumulator(self) -> Accumulator:
        return Gather(lambda sent, server: {name: torch.cat(rows) for name, rows in sent.items()}, filled_rows)


def encoder_of(size: Sequence[int], classes: int, seed: int) -> nn.Sequential:
    """The network whose gradients clients send: for images a LeNet with sigmoids, else a linear layer.

    Its weights are uniform in [-0.5, 0.5], the same for the same seed.

    Example:
        >>> encoder_of((3, 32, 32), 10, seed=0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    if len(size) == 3:
        for channels, stride in ((size[0], 2), (12, 2), (12, 1)):
            layers += [nn.Conv2d(channels, 12, 5, stride, padding=2), nn.Sigmoid()]
    body = nn.Sequential(*layers, nn.Flatten())
    encoder = nn.Sequential(*body, nn.Linear(body(torch.zeros(1, *size)).shape[1], classes))
    generator = torch.Generator().manual_seed(seed)
    for parameter in encoder.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return encoder


@torch.enable_grad()
def gradient_at(encoder: nn.Module, x: Tensor, label: int, create_graph: bool = False) -> Tensor:
    """The gradient of the cross-entropy at one sample of a class, of all parameters as one vector."""
    loss = F.cross_entropy(encoder(x), torch.tensor([label], device=x.device))
    pieces = torch.autograd.grad(loss, [*encoder.parameters()], create_graph=create_graph)
    return torch.cat([piece.flatten() for piece in pieces])


def invert(encoder: nn.Module, gradient: Tensor, label: int, start: Tensor, iterations: int = 250) -> Tensor:
    """The sample, of the shape of ``start``, whose `gradient_at` is nearest to one, by L-BFGS (Zhu et al. 2019).

    Of a linear layer, whose gradient is ``g x^T`` for the weight and g for the bias, it is x.

    Example:
        >>> linear, x = nn.Sequential(nn.Linear(2, 3)), torch.tensor([[0.5, -2.0]])
        >>> invert(linear, gradient_at(linear, x, 1), 1, torch.zeros(1, 2)).round(decimals=3)
        tensor([[ 0.5000, -2.0000]])
    """
    x, size = start.clone().requires_grad_(), gradient.square().sum().clamp(min=1e-30)
    optimizer = torch.optim.LBFGS([x], max_iter=iterations, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        apart = (gradient_at(encoder, x, label, create_graph=True) - gradient).square().sum() / size
        (x.grad,) = torch.autograd.grad(apart, x)
        return apart

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return x.detach()
