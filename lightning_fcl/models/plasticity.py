"""Intrinsic plasticity of one layer of a reservoir: where its gains and biases should go, summed step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class PlasticityOfLayer:
    """The sums over time of one layer's descent directions: each step is worked off while it is in the cache.

    See `lightning_fcl.models.EchoStateNetwork.plasticity` for the formula.
    """

    drive: Tensor
    recurrent: Tensor
    gain: Tensor
    bias: Tensor
    constant: Tensor
    leak: float
    state: Tensor
    mu: float
    sigma: float

    def __post_init__(self) -> None:
        self.drive, self.recurrent, self.variance = self.drive.t(), self.recurrent.t(), self.sigma**2
        self.steps = 0
        # Sums of -s2 db and -s2 net db.
        self.shift, self.product = torch.zeros_like(self.state), torch.zeros_like(self.state)

    def run(self, u: Tensor, skip: int) -> Tensor:
        """Add a block of inputs (steps, batch, inputs), but for the first ``skip`` steps; the layer's states."""
        net = torch.addmm(self.constant, u.reshape(-1, u.shape[-1]), self.drive).view(*u.shape[:2], -1)
        h, shift = torch.empty_like(self.state), torch.empty_like(self.state)
        for t, step in enumerate(net.unbind(0)):
            step.addmm_(self.state, self.recurrent)
            tanh_(torch.addcmul(self.bias, step, self.gain, out=h))
            if t >= skip:
                # h (1 + 2 s2 - h^2 + mu h) - mu, which is -s2 db
                torch.mul(h, h, out=shift).neg_().add_(1 + 2 * self.variance)
                if self.mu:
                    shift.add_(h, alpha=self.mu)
                shift.mul_(h).sub_(self.mu)
                self.shift.add_(shift)
                self.product.addcmul_(step, shift)
                self.steps += 1
            # The net input of a step is not needed any more: its place takes the state.
            self.state = torch.lerp(self.state, h, self.leak, out=step)
        self.state = self.state.clone()
        return net

    def directions(self) -> tuple[Tensor, Tensor]:
        """Of gain and bias, both of shape (batch, units)."""
        return self.steps / self.gain - self.product / self.variance, self.shift / -self.variance


def tanh_(values: Tensor) -> None:
    """The hyperbolic tangent, in place. On the CPU numpy's is several times faster than torch's, and no less exact."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        array = values.numpy()
        np.tanh(array, out=array)
    else:
        values.tanh_()
