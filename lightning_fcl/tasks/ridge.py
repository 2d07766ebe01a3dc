"""Classification by ridge regression on the features of a frozen network."""

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
    """Classification by ridge regression on the features of a frozen network. See `RidgeTask` for its training.

    The network is always in evaluation mode, so that its features do not change.
    `lightning_fcl.callbacks.BaseSession` trains the network and adds the samples of the base session. The statistics A
    and B are defined in `RidgeTask`. An index k stands for client k, and I is the identity matrix.

    Args:
        model: Network whose ``embed(x)`` returns features of shape (batch, ``features``).
        num_classes: Number of classes.
        beta: Regularization, at least 0. A list selects the value with the best predictions on the validation samples
            of all tasks after each round. The authors of RanPAC select it by the squared error on a fifth of the
            training samples of each task.
        symmetric: Whether only the upper triangle of B is stored and uploaded.
        upload: Upload of a client. ``"statistics"``: A and B. ``"weights"``: the client's own solution. ``"moments"``:
            the sum of features and the number of samples, for each class in each random group. From the moments, the
            server estimates B (Guan et al. 2026, STSA-E; see `GroupMoments`).
        min_samples: Number of samples below which a client's statistics cause a warning. Default: the number of
            features.
        random_features: Number of random features that replace the network's features, see `RandomFeatures` (RanPAC,
            and STSA, which uses ``beta=1e6``). Default: the network's features.
        seed: Seed of the random features.
        bias: Whether a column of ones is the last feature. This feature is regularized like all others.
        rank: Number of leading singular values and right singular vectors of a client's features that the client
            uploads instead of B. The server merges the uploads and truncates the result again. The solution is in the
            space of the remaining vectors (FedRAN). Default: all of B.
        gamma: Regularization of each client's own solution, ``W_k = A_k (B_k + gamma I)^-1``. A client's predictions
            after its training use this solution. The client adds ``gamma I`` to the B that it uploads. The server
            subtracts all these additions before it solves, so its solution does not depend on gamma (AFL, He et al.
            2025). The sums of A and B correspond to the paper's absolute aggregation law.
        groups: Number of groups of a client's samples with ``upload="moments"``.
        unit_norm: Whether to divide the features of each sample, with the bias, by their norm. Differential privacy
            requires it, see `lightning_fcl.DifferentialPrivacy`.

    Raises:
        ValueError: If an argument is out of range or incompatible with ``upload``, or if the network has no features.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> task = RidgeClassifier(DSICNet(), num_classes=10)
        >>> task(torch.zeros(2, 1, 64, 48)).shape, sum(v.nbytes for n, v in task.named_buffers() if n[-1] in "AB")
        (torch.Size([2, 10]), 32320)
    """

    citations: ClassVar[tuple[str, ...]] = ("bacciu2021incfed",)

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
        unit_norm: bool = False,
    ) -> None:
        embedding_size = require_embedding_body(model).features
        features = (embedding_size if random_features is None else random_features) + bias
        super().__init__(features, OneHot(num_classes), beta, upload, symmetric, min_samples, rank, gamma, groups)
        self.model = model.eval()
        self.random_features = (
            None if random_features is None else RandomFeatures(embedding_size, random_features, seed)
        )
        self.bias = bias
        self.unit_norm = unit_norm
        self.num_classes = num_classes
        self.features = features

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (batch, num_classes), which approximate 1 for a sample's class and 0 for other classes."""
        outputs: Tensor = self.readout(self.embed(x)).to(x.dtype)
        return outputs

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """Return the features that are the inputs of the readout, shape (batch, features)."""
        body: EmbedsSamples = require_embedding_body(self.model)
        return readout_features(body.embed(x), self.random_features, self.bias, self.unit_norm)

    def readout_inputs(self, x: Tensor) -> Iterator[Tensor]:
        yield self.embed(x)[None]

    def to_network(self) -> FeatureReadout:
        """Return a plain network that makes the same predictions as the task with its current weights."""
        body, lift = copy.deepcopy((require_embedding_body(self.model), self.random_features))
        network = FeatureReadout(body, self.num_classes, lift, self.bias, self.unit_norm)
        network.weight.copy_(self.readout.weight)
        return network

    @property
    def private_sums_obstacle(self) -> str:
        if not self.unit_norm:
            return "the norm of its features has no limit. Set `unit_norm=True` of the task"
        return super().private_sums_obstacle

    def on_base_session(self, x: Tensor, y: Tensor) -> None:
        """Add the samples of the base session, and solve for the readout before the first round."""
        self.add_samples(x, y)
        self.readout.solve()
