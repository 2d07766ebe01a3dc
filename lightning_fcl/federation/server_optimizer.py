"""Server optimizers: any `torch.optim` optimizer that steps the server towards what its clients have sent."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.federation.optimizer_state import OptimizerFactory, make_optimizer
from lightning_fcl.federation.reductions import State


class ServerOptimizer:
    """Steps the server's parameters with a `torch.optim` optimizer on the pseudo-gradient (Reddi et al. 2021).

    The pseudo-gradient is the server state minus the aggregate: ``SGD(lr=1)`` is FedAvg, ``SGD(lr=1, momentum=.9)``
    FedAvgM, ``Adam`` FedAdam. It moves the floating-point parameters that are averaged; buffers take the aggregate.

    Args:
        factory: Makes the optimizer from a list of parameters.
        names: The entries that it moves.

    Example:
        >>> import torch
        >>> optimizer = ServerOptimizer(lambda params: torch.optim.SGD(params, lr=0.5), names=["w"])
        >>> optimizer.step(server={"w": torch.tensor([1.0])}, aggregate={"w": torch.tensor([3.0])})
        {'w': tensor([2.])}
    """

    def __init__(self, factory: OptimizerFactory, names: list[str]) -> None:
        self._factory = factory
        self._names = names
        self._optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._pending: dict[str, object] | None = None

    def step(self, server: Mapping[str, Tensor], aggregate: Mapping[str, Tensor]) -> State:
        """The server state after one step from ``server`` towards ``aggregate``."""
        if self._optimizer is None:
            self._parameters = [nn.Parameter(server[name].clone()) for name in self._names]
            self._optimizer = make_optimizer(self._factory, self._parameters, "server_optimizer")
            if self._pending is not None:
                self._optimizer.load_state_dict(self._pending)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.data.copy_(server[name])
            parameter.grad = (server[name] - aggregate[name]).to(parameter.dtype)
        self._optimizer.step()
        moved = {name: p.detach().clone() for name, p in zip(self._names, self._parameters, strict=True)}
        return {**aggregate, **moved}

    def state_dict(self) -> dict[str, object]:
        """The optimizer's state, for checkpoints; before the first step the one it took over, if any."""
        return self._optimizer.state_dict() if self._optimizer is not None else self._pending or {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over the state of an earlier run at the next step."""
        self._optimizer = None
        self._pending = state or None
