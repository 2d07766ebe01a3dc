"""Classification by ridge regression on the features of a network that stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from lightning_fcl.models.readout import EmbedsSamples, FeatureReadout, RandomFeatures, readout_features
from lightning_fcl.tasks.base import require_embedding_body
from lightning_fcl.tasks.ridge_base import RidgeTask, UploadKind
from lightning_fcl.tasks.ridge_statistics import OneHot


class RidgeClassifier(RidgeTask):
    """Classification by ridge regression on the features of a network that stays. See `RidgeTask` for what it does.

    The network is always in evaluation mode: its features are the same in training and afterwards.
    `lightning_fcl.callbacks.BaseSession` trains it and adds the base session's samples.

    Args:
        model: The network. Its ``embed(x)`` gives the features, shape (batch, ``features``).
        num_classes: Number of classes.
        beta: Regulariser, at least 0; of several, the one that does best on the validation samples after each round.
        symmetric: Whether only the upper triangle of B is kept and sent.
        upload: What a client sends: its ``"statistics"``; its own solution, the ``"weights"``; or the ``"moments"`` of
            random groups of its samples, sums and numbers of each class, from which the server estimates B (Guan et al.
            2026, STSA-E; see `GroupMoments`).
        min_samples: Clients whose statistics are of fewer samples are warned of; None: as many as there are features.
        random_features: The readout sees so many random features of the network's (RanPAC, and STSA, whose
            regulariser is 1e6; see `RandomFeatures`); None: the network's own.
        seed: Seed of the random features.
        bias: Whether a column of ones comes last among the features. It is regularised as all others.
        rank: Of B a client sends so many leading singular values and vectors, which the server merges and cuts again;
            the solution lies in the space that they span (FedRAN); None: all of B.
        gamma: Regulariser of each client's own readout, ``W_k = A_k (B_k + gamma I)^-1``, which is evaluated after its
            training, and added to the B that it sends. Before it solves, the server takes it away as often as it has
            come: the solution does not depend on it (He et al. 2025, AFL, whose absolute aggregation law comes to the
            sums of A and B).
        groups: Groups that a client's samples fall into, with ``upload="moments"``.

    Raises:
        ValueError: If an argument is out of range, does not go with ``upload``, or the network has no such features.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> task = RidgeClassifier(DSICNet(), num_classes=10)
        >>> task(torch.zeros(2, 1, 64, 48)).shape, sum(v.nbytes for n, v in task.named_buffers() if n[-1] in "AB")
        (torch.Size([2, 10]), 32320)
    """

    output_kind: ClassVar[str] = "0/1"

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        beta: float | list[float] = 1.0,
        symmetric: bool = True,
        upload: UploadKind | Literal["moments"] = "statistics",
        min_samples: int | None = None,
        random_features: int | None = None,
        seed: int = 0,
        bias: bool = False,
        rank: int | None = None,
        gamma: float = 0.0,
        groups: int = 5,
    ) -> None:
        embedding_size = require_embedding_body(model).features
        features = (embedding_size if random_features is None else random_features) + bias
        super().__init__(features, OneHot(num_classes), beta, upload, symmetric, min_samples, rank, gamma, groups)
        self.model = model.eval()
        self.random_features = (
            None if random_features is None else RandomFeatures(embedding_size, random_features, seed)
        )
        self.bias = bias
        self.num_classes = num_classes
        self.features = features

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Outputs near 1 for the right class and near 0 for the others, shape (batch, num_classes)."""
        outputs: Tensor = self.readout(self.embed(x)).to(x.dtype)
        return outputs

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """The features of samples that the readout sees, shape (batch, features)."""
        body: EmbedsSamples = require_embedding_body(self.model)
        return readout_features(body.embed(x), self.random_features, self.bias)

    def readout_inputs(self, x: Tensor) -> Iterator[Tensor]:
        yield self.embed(x)[None]

    def to_network(self) -> FeatureReadout:
        """A plain network that predicts as this task does now."""
        body, lift = copy.deepcopy((require_embedding_body(self.model), self.random_features))
        network = FeatureReadout(body, self.num_classes, lift, self.bias)
        network.weight.copy_(self.readout.weight)
        return network

    def on_base_session(self, x: Tensor, y: Tensor) -> None:
        """Add the base session's samples, and solve: the readout predicts before the first round."""
        self.add_samples(x, y)
        self.readout.solve()
