"""FOT: the server takes out of each update what would move a layer's output for inputs of earlier tasks."""

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
    """Every round: the server projects the averaged update out of what earlier tasks have taught (Bakman et al. 2024).

    Of each linear and convolutional layer that learns and is averaged the server keeps an orthonormal basis U of what
    it sees, and after a round in which the weights have gone from W to W' they become ``W + (W' - W) (I - U U^T)``:
    for inputs in the span of U the layer's output does not move. A bias is the weight of one more input, which is
    always 1. What is neither, such as batch normalisation, is averaged as ever. In the first task U is empty.

    For an experience a client uploads, for each layer, ``X~^T Omega`` and the squares of ``||X~||`` and ``||X||``: X
    are the layer's inputs for its samples, X~ what of them lies outside of the span of U, which it has received, Omega
    numbers that it draws, uniform in [-1, 1]. The server adds them up, which is the same sketch of all clients' inputs
    together. When the experience ends, the server takes the fewest leading directions (left singular vectors) that
    leave at most the share ``1 - eps`` of the energy outside, and adds them to U. A sketch flatters its leading
    directions: of the inputs themselves U holds somewhat less than ``eps``.

    The authors have clients send this after the experience, of the final model. Here it belongs to the client's last
    upload of the experience, and is of the client's own model: see `MethodBase.contribute_experience`.

    Args:
        eps: Share of the energy of a layer's inputs that U is to hold after each task, above 0 and at most 1.

    Raises:
        ValueError: If ``eps`` is out of range, the Trainer is no federation's whose server goes to the mean of what
            clients have trained from its model, or no layer is averaged.

    Example:
        >>> FOT(eps=0.9).eps
        0.9
    """

    needs: ClassVar[Needs] = Needs(
        round_samples=True,
        features=True,
        tensors=True,
        federation_reason="no server brings updates together. Use the strategy",
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
            state[f"energy.{name}"] = size.new_zeros(2)  # of X~, and of X
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
        """The mean, without what would move outputs for inputs in the bases, which then take in what was sent."""
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
    """What of vectors, shape (n, d), lies outside of the span of an orthonormal basis, shape (d, r)."""
    return rows - (rows @ basis) @ basis.T


def extend_basis(basis: Tensor, sketch: Tensor, energy: Tensor, eps: float) -> Tensor:
    """A basis, shape (d, r), and the fewest directions of a sketch, shape (d, sums), that hold a share of the energy.

    ``energy`` has the squared norms of what lies outside of the basis, and of the vectors themselves, shape (2,).

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
