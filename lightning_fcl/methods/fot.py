"""FOT: the server projects each update so that a layer's output for inputs of earlier tasks does not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.aggregation import ReductionRules, State, state_tensors
from lightning_fcl.methods.context import Client, Server, strip_prefix, zeros_like_state
from lightning_fcl.methods.drift_correction import ServerUpdateMethod
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.layer_inputs import averaged_layers, layer_inputs, to_weight_state, weight_matrix
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.prototypes import SparseSum
from lightning_fcl.validation import unit_interval, validated


@dataclass(eq=False)
class FOT(ServerUpdateMethod):
    """FOT: federated orthogonal training, which projects the aggregated update (Bakman et al., 2024).

    For each trainable, averaged linear or convolutional layer, the server keeps an orthonormal basis U of the main
    directions of the layer's inputs in earlier tasks. If the weights change from W to W' in a round, the server sets
    the weights to ``W + (W' - W) (I - U U^T)``. The layer's output for inputs in the span of U then does not change.
    The bias is treated as the weight of an additional input that is always 1. All other tensors, such as the tensors of
    batch normalization, are aggregated as usual. In the first task, U is empty.

    For each experience, a client uploads a sketch ``X~^T Omega`` and the values ``||X~||^2`` and ``||X||^2`` for each
    layer. X contains the layer's inputs for the client's samples. X~ is the part of X outside of the span of the
    downloaded U. Omega is a random matrix, uniform in [-1, 1]. The sum of the clients' sketches is a sketch of the
    inputs of all clients.

    When the experience ends, the server adds leading directions (left singular vectors) of the summed sketch to U. It
    adds the smallest number of directions that leaves at most the share ``1 - eps`` of the energy outside of the span.
    A sketch overestimates the energy of its leading directions. The span of U therefore contains slightly less than
    the share ``eps`` of the energy of the inputs.

    In the authors' method, clients compute the sketch with the final model, and upload it after the experience. Here a
    client computes the sketch with its own model, and uploads it in a round of the experience. See
    `MethodBase.contribute_experience`.

    Deviation: the energy is the squared norm of the inputs. For the share of the energy outside of the span, the
    authors' code uses the norms without squares, and therefore adds more directions. For example, if half of the
    energy is outside and ``eps`` is 0.95, the added directions contain 90 % of the energy of X~ here. In the authors'
    code, they contain 93 %. The elements of the authors' Omega are from N(0, 1).

    Args:
        eps: Share of the energy of a layer's inputs that U should contain after each task, above 0 and at most 1.

    Raises:
        ValueError: If ``eps`` is out of range, or no layer is averaged. Also if the Trainer does not use
            ``strategy="federated"``, or the server's model is not the mean of the uploads.

    Example:
        >>> FOT(eps=0.9).eps
        0.9
    """

    citations: ClassVar[tuple[str, ...]] = ("bakman2024fot",)

    needs: ClassVar[Needs] = Needs(
        round_samples=True,
        features=True,
        tensors=True,
        federation_reason="it has no server that projects updates. Use the strategy",
    )
    reductions: ClassVar[ReductionRules] = {
        "basis.*": "download_only",
        "sketch.*": SparseSum(),
        "energy.*": SparseSum(),
    }

    eps: float = validated(0.95, unit_interval)

    def init_server_state(self, module: L.LightningModule) -> State:
        state: State = {}
        for name in averaged_layers(module):
            size = weight_matrix(state_tensors(module), name)
            state[f"basis.{name}"] = size.new_zeros(size.shape[1], 0)
            state[f"sketch.{name}"] = size.new_zeros(size.shape[1], size.shape[1])
            # Squared norms of X~ and of X.
            state[f"energy.{name}"] = size.new_zeros(2)
        return state

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        x, _ = finite_pairs(data)
        bases = strip_prefix(client.server_state, "basis")
        contribution = zeros_like_state(
            {name: value for name, value in client.server_state.items() if not name.startswith("basis.")}
        )
        for name, rows in layer_inputs(client.module, bases, trained_state, x):
            residual = remove_projection(rows, bases[name])
            omega = 2 * torch.rand(rows.shape, generator=client.generator, dtype=rows.dtype).to(rows.device) - 1
            contribution[f"sketch.{name}"] += residual.T @ omega
            contribution[f"energy.{name}"] += torch.stack([residual.square().sum(), rows.square().sum()])
        return contribution

    def process_aggregate(self, server: Server) -> State:
        """Return the projected weights of each layer with a nonempty basis. Extend bases when an experience ends."""
        updated_state, previous_state, mean, server_state = (
            dict[str, Tensor](),
            server.previous_state,
            server.state,
            server.server_state,
        )
        for name, basis in strip_prefix(server_state, "basis").items():
            if basis.shape[1]:
                first = weight_matrix(previous_state, name)
                updated_state |= to_weight_state(
                    mean, name, first + remove_projection(weight_matrix(mean, name) - first, basis)
                )
            sketch, energy = server_state[f"sketch.{name}"], server_state[f"energy.{name}"]
            if server.ends and energy.any():
                server_state[f"basis.{name}"] = extend_basis(basis, sketch, energy, self.eps)
                server_state.update(
                    {f"sketch.{name}": torch.zeros_like(sketch), f"energy.{name}": torch.zeros_like(energy)}
                )
        return updated_state


def remove_projection(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the part of row vectors, shape (n, d), outside of the span of an orthonormal basis, shape (d, r)."""
    return rows - (rows @ basis) @ basis.T


def extend_basis(basis: Tensor, sketch: Tensor, energy: Tensor, eps: float) -> Tensor:
    """Return a basis extended by the fewest leading directions of a sketch that contain the required energy.

    Args:
        basis: Orthonormal basis, shape (d, r).
        sketch: Sum of the clients' sketches, shape (d, d).
        energy: Squared norms of the inputs' part outside of the basis, and of the inputs, shape (2,).
        eps: Share of the inputs' energy that the extended basis should contain.

    Example:
        >>> sketch = torch.diag(torch.tensor([3.0, 1.0, 0.1]))
        >>> extend_basis(torch.zeros(3, 0), sketch, torch.tensor([10.01, 10.01]), eps=0.95).abs()
        tensor([[1., 0.],
                [0., 1.],
                [0., 0.]])
    """
    ratio = float(energy[0] / energy[1])
    if ratio <= 1 - eps:
        return basis
    left_vectors, values, _ = torch.linalg.svd(remove_projection(sketch.T, basis).T, full_matrices=False)
    cumulative_energy = values.square().cumsum(dim=0) / values.square().sum()
    count = min(int((cumulative_energy < (ratio - (1 - eps)) / ratio).sum()) + 1, len(basis) - basis.shape[1])
    new, _ = torch.linalg.qr(remove_projection(left_vectors[:, :count].T, basis).T)
    return torch.cat([basis, new], dim=1)
