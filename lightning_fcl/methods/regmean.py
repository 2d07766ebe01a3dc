"""RegMean and LoRM: merge linear layers by least squares on their outputs instead of averaging their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.aggregation import ReductionRules, State, state_tensors
from lightning_fcl.methods.base import Pattern
from lightning_fcl.methods.context import Client, Server, strip_prefix, zeros_like_state
from lightning_fcl.methods.drift_correction import ServerUpdateMethod
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.layer_inputs import averaged_layers, layer_inputs, to_weight_state, weight_matrix
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.prototypes import SparseSum
from lightning_fcl.models.lora import AdaptedLinear
from lightning_fcl.models.ridge import pack_upper, unpack_upper
from lightning_fcl.validation import between, validated

# Eigenvalues of G below this fraction of the largest eigenvalue are rounding errors: no input has a component in their
# directions.
_NONE = 1e-10


@dataclass(eq=False)
class RegMean(ServerUpdateMethod):
    """RegMean (Jin et al., 2023): merge layers so that their outputs fit the outputs of all clients' layers.

    After local training a client also uploads the upper triangle of ``G_k = X_k^T X_k``, and ``W_k G_k``, for each
    trained linear or convolutional layer. W_k are the layer's weights on client k. X_k are the layer's inputs for the
    client's samples, computed with the client's own model.

    The server sums both values over clients and sets the layer to ``W = (sum_k W_k G_k) (sum_k G_k)^+``. For
    ``alpha=1``, this minimizes ``sum_k ||X_k W^T - X_k W_k^T||^2``. A bias is the weight of an additional input, which
    is always 1. In directions without inputs, W is the average of the clients' weights, as in FedAvg. All other entries
    are averaged as in FedAvg.

    With ``alpha`` below 1, the off-diagonal values of G are multiplied by ``alpha``. With ``alpha=0``, clients upload
    only the diagonal, and the merge is a weighted average of each weight separately.

    Args:
        alpha: Factor of the off-diagonal values of G, from 0 to 1. The default of 1 gives the exact least squares
            solution. The paper mostly uses 0.9.

    Raises:
        ValueError: If ``alpha`` is out of range, no layer is averaged, or the Trainer does not run a federation. Also
            if the server's model is not the mean of all clients' models, for example because of a server optimizer.

    Example:
        >>> RegMean(alpha=0.0).alpha
        0.0
    """

    citations: ClassVar[tuple[str, ...]] = ("jin2023regmean",)

    needs: ClassVar[Needs] = Needs(
        round_samples=True,
        features=True,
        tensors=True,
        federation_reason="it has no server that merges layers. Use the strategy",
    )
    reductions: ClassVar[ReductionRules] = {"gram.*": SparseSum(), "answers.*": SparseSum()}

    alpha: float = validated(1.0, between, 0, 1)

    def init_server_state(self, module: L.LightningModule) -> State:
        state: State = {}
        for name in averaged_layers(module):
            weight = weight_matrix(state_tensors(module), name)
            state[f"gram.{name}"] = zero_gram(weight, diagonal=self.alpha == 0)
            state[f"answers.{name}"] = torch.zeros_like(weight)
        return state

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        statistics = zeros_like_state(client.server_state)
        weights = {name: weight_matrix(trained_state, name) for name in strip_prefix(statistics, "gram")}
        learnt = [
            name for name, value in weights.items() if not value.equal(weight_matrix(client.received_state, name))
        ]
        for name, gram in self._grams(client.module, learnt, trained_state, finite_pairs(data)[0]).items():
            statistics[f"gram.{name}"] = pack_gram(gram)
            statistics[f"answers.{name}"] = gram_product(weights[name], gram)
        return statistics

    def _grams(self, module: L.LightningModule, names: Iterable[str], state: State, x: Tensor) -> dict[str, Tensor]:
        """Return G of the inputs of layers, by layer name, with its off-diagonal values multiplied by ``alpha``.

        The shape is (d, d), or (d,) for the diagonal if ``alpha`` is 0. Layers without inputs are left out.
        """
        grams: dict[str, Tensor] = {}
        for name, rows in layer_inputs(module, names, state, x):
            gram = rows.T @ rows if self.alpha else rows.square().sum(dim=0)
            grams[name] = grams[name] + gram if name in grams else gram
        if not self.alpha:
            return grams
        return {name: gram.lerp(gram.diagonal().diag(), 1 - self.alpha) for name, gram in grams.items()}

    def process_aggregate(self, server: Server) -> State:
        """Return the trained layers, merged by least squares on their outputs, and reset the sums to 0."""
        updated_state, mean, server_state = dict[str, Tensor](), server.state, server.server_state
        for name, packed in strip_prefix(server_state, "gram").items():
            if packed.any():
                weight = weight_matrix(mean, name)
                gram = unpack_gram(packed, weight.shape[1])
                new_weight = merge_regression(weight, server_state[f"answers.{name}"], gram)
                updated_state |= to_weight_state(mean, name, new_weight)
        server_state.update(zeros_like_state(server_state))
        return updated_state


def zero_gram(weight: Tensor, diagonal: bool) -> Tensor:
    """Return the packed Gram matrix of zero inputs of a layer with the weights ``weight``, shape (outputs, d)."""
    size = weight.shape[1]
    return weight.new_zeros(size if diagonal else size * (size + 1) // 2)


def pack_gram(gram: Tensor) -> Tensor:
    """Return the upper triangle of a matrix, shape (d * (d + 1) / 2,), or a diagonal, shape (d,), unchanged."""
    return gram if gram.dim() == 1 else pack_upper(gram)


def unpack_gram(packed: Tensor, size: int) -> Tensor:
    """Return the Gram matrix, shape (size, size), or the diagonal, shape (size,), of the result of `pack_gram`."""
    return packed if len(packed) == size else unpack_upper(packed, size)


def gram_product(weight: Tensor, gram: Tensor) -> Tensor:
    """Return ``W G`` for a layer W, shape (outputs, d). G is a matrix, shape (d, d), or a diagonal, shape (d,)."""
    return weight @ gram if gram.dim() == 2 else weight * gram


def merge_regression(mean: Tensor, weighted: Tensor, gram: Tensor) -> Tensor:
    """Return the weights of the merged layer, ``(sum W G) (sum G)^+``, shape (outputs, d).

    The outputs of this layer are nearest to the outputs of the clients' layers, by least squares.

    Args:
        mean: The average of the clients' weights, shape (outputs, d). In directions without inputs, this average is the
            result.
        weighted: The sum of the clients' `gram_product`, shape (outputs, d).
        gram: The sum of the clients' Gram matrices, shape (d, d), or of their diagonals, shape (d,).

    Example:
        >>> one, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0]])
        >>> gram = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0])
        >>> merge_regression((one + other) / 2, gram_product(one, gram[0]) + gram_product(other, gram[1]), sum(gram))
        tensor([[1.5000, 4.0000]])
    """
    rest = weighted - gram_product(mean, gram)
    if gram.dim() == 2:
        tolerance = max(_NONE, len(gram) * torch.finfo(gram.dtype).eps)
        inverse = torch.linalg.pinv(gram, rtol=tolerance, hermitian=True)
    else:
        inverse = torch.where(gram > _NONE * gram.max(), 1 / gram, 0.0)
    return mean + gram_product(rest, inverse)


@dataclass(eq=False)
class LoRM(RegMean):
    """LoRM (Salami et al., 2025): `RegMean` for a `LoRA` network, in which one factor trains at a time.

    In the first round of an experience and in every second round after it, B trains and A is identical for all clients.
    In the rounds between, A trains. The head trains in all rounds. G_k is the matrix of the layer's inputs ``x``, with
    its off-diagonal values multiplied by ``alpha``. The closed form is ``(sum_k B_k A G_k A^T) (A (sum_k G_k) A^T)^+``
    for B, and the formula of `RegMean` for A, as in the paper. For B, a client uploads ``A G_k A^T``, which has
    ``rank * (rank + 1) / 2`` different numbers for any ``alpha``. Deviation: the authors use ``alpha=0`` for the body
    and 0.5 for the head. Here the same ``alpha`` applies to both.

    For each experience a client also uploads ``G_k`` of the inputs of each layer with a LoRA adapter, computed with its
    own model. At the end of experience t, G_t is the sum of these ``G_k``, and W_t is the server's layer including its
    adapter. The layer becomes ``(sum_t W_t G_t) (sum_t G_t)^+`` over all experiences t so far, and B is reset to 0.

    Deviation: in the paper every task starts from the original body. Here an experience starts from the layers merged
    after the earlier experiences. The server sends the merged layers to the clients in each later round, because the
    merged layers differ from the original layers that all clients have.

    Args:
        alpha: Factor of the off-diagonal values of G, from 0 to 1. See `RegMean`.

    Raises:
        ValueError: For the same reasons as in `RegMean`.

    Example:
        >>> LoRM(alpha=0.5).vectorizable
        False
    """

    citations: ClassVar[tuple[str, ...]] = ("salami2025lorm",)

    reductions: ClassVar[ReductionRules] = {
        **RegMean.reductions,
        "task.*": SparseSum(),
        "tasks.*": "constant",
        "turn": "download_only",
    }

    def init_server_state(self, module: L.LightningModule) -> State:
        state = super().init_server_state(module) | {"turn": torch.tensor(0)}
        for name, layer in _adapted(module).items():
            weight, b = layer.layer.weight.detach().double(), layer.b.weight.detach().double()
            gram, answers = zero_gram(weight, diagonal=self.alpha == 0), torch.zeros_like(weight)
            state |= {f"task.{name}": gram, f"tasks.gram.{name}": gram, f"tasks.answers.{name}": answers}
            state[f"gram.{name}.b"] = zero_gram(b, diagonal=False)
        return state

    def trainable_patterns(self, client: Client) -> Pattern | None:
        return "!*.a.weight" if int(client.server_state["turn"]) % 2 == 0 else "!*.b.weight"

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        names = {f"{name}.a": f"task.{name}" for name in _adapted(client.module)}
        grams = self._grams(client.module, names, trained_state, finite_pairs(data)[0])
        missing = {key: torch.zeros_like(client.server_state[key]) for key in names.values()}
        return missing | {names[name]: pack_gram(gram) for name, gram in grams.items()}

    def _grams(self, module: L.LightningModule, names: Iterable[str], state: State, x: Tensor) -> dict[str, Tensor]:
        """Return G of layers as in `RegMean`, and ``A G A^T`` of the layer's G for each factor B."""
        factors = {f"{name}.b": f"{name}.a" for name in _adapted(module)}
        sources = {name: factors.get(name, name) for name in names}
        grams = super()._grams(module, dict.fromkeys(sources.values()), state, x)
        return {
            name: grams[source] if name == source else _project(grams[source], weight_matrix(state, source))
            for name, source in sources.items()
            if source in grams
        }

    def process_aggregate(self, server: Server) -> State:
        tasks = {name: value for name, value in server.server_state.items() if name.startswith(("task.", "tasks."))}
        turn = server.server_state["turn"] + 1
        updated_state = super().process_aggregate(server)
        state = {**server.state, **updated_state}
        for name, layer in _adapted(server.module).items():
            if not (server.ends and (gram := tasks[f"task.{name}"]).any()):
                continue
            a, b, body = (state[f"{name}.{part}.weight"] for part in ("a", "b", "layer"))
            weight = body.double() + layer.scale * b.double() @ a.double()
            tasks[f"tasks.gram.{name}"] = grams = tasks[f"tasks.gram.{name}"] + gram
            products = gram_product(weight, unpack_gram(gram, weight.shape[1]))
            tasks[f"tasks.answers.{name}"] = answers = tasks[f"tasks.answers.{name}"] + products
            tasks[f"task.{name}"], turn = torch.zeros_like(gram), torch.zeros_like(turn)
            updated_state[f"{name}.layer.weight"] = merge_regression(
                weight, answers, unpack_gram(grams, weight.shape[1])
            ).to(body)
            updated_state[f"{name}.b.weight"] = torch.zeros_like(b)
        server.server_state.update({**tasks, "turn": turn})
        return updated_state


def _project(gram: Tensor, a: Tensor) -> Tensor:
    """Return ``A G A^T``, shape (rank, rank), of the factor A, shape (rank, d)."""
    return gram_product(a, gram) @ a.T


def _adapted(module: L.LightningModule) -> dict[str, AdaptedLinear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, AdaptedLinear)}
