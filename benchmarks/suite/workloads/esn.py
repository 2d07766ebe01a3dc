"""Reservoir workload: 100 clients with 4 random sequences of 200 steps, and a reservoir of 300 units.

Clients upload the sums for a ridge regression.
"""

import torch
import torch.nn.functional as F

from lightning_fcl.models import EchoStateNetwork
from suite.workloads.gradient import Gradient

CLASSES, BETA = 4, 1.0


def make(quick=False):
    """Return the workload with random sequences, because the time does not depend on the values."""
    clients, steps, units = (4, 20, 16) if quick else (100, 200, 300)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * clients, steps, 6, generator=generator)
    y = torch.randint(CLASSES, (4 * clients,), generator=generator)
    reservoir = EchoStateNetwork(6, units, leaking_rate=0.5, seed=0).requires_grad_(False)
    return Sums(x, y, [4] * clients, reservoir, CLASSES, 4)


class Sums(Gradient):
    """Ridge regression on reservoir states S and one-hot labels Y, which have one column per time step.

    The server sums the clients' A = Y S^T and B = S S^T, and solves W (B + beta I) = A for the readout weights W.
    """

    by_gradients = False

    def initial(self):
        """Return the server's state before the first round: sums and weights of 0."""
        units = self.model.features
        shapes = {"A": (self.classes, units), "B": (units, units), "weight": (self.classes, units)}
        return {name: torch.zeros(shape, dtype=torch.float64, device=self.x.device) for name, shape in shapes.items()}

    def local(self, server, client):
        """Return a client's statistics and the weight 1. With equal weights, the server can compute the sum."""
        x, y = self.samples(client)
        states = self.model(x)
        targets = F.one_hot(y, self.classes).double()[:, None].expand(-1, states.shape[1], -1).flatten(0, 1)
        states = states.double().flatten(0, 1)
        return {"A": targets.T @ states, "B": states.T @ states, "weight": torch.zeros_like(server["weight"])}, 1

    def end(self, server, mean, total):
        """Return the new sums of the server, and the readout that is computed from them."""
        a, b = (server[name] + mean[name] * total for name in ("A", "B"))
        regularised = b + BETA * torch.eye(len(b), dtype=b.dtype, device=b.device)
        return {"A": a, "B": b, "weight": torch.linalg.solve(regularised, a, left=False)}

    def task(self):
        """Return the LightningModule that computes the same readout with this library."""
        from lightning_fcl import ReservoirClassifier

        return ReservoirClassifier(self.model, self.classes, BETA, min_samples=0)

    def state_of(self, task):
        """Return the server's state, read from the LightningModule."""
        return {name: getattr(task.readout, name).detach().cpu() for name in ("A", "B", "weight")}
