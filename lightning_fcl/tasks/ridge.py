"""Ridge regression on what a body that stays makes of samples: a few sums instead of weights, and nothing to forget."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.attached import stream_of, transfer_batch
from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import at_least, one_of
from lightning_fcl.federation.aggregation import Rules, reductions_of
from lightning_fcl.federation.protocol import RunsFederation, federation_of
from lightning_fcl.models.readout import EmbedsSamples, FeatureReadout, RandomFeatures, seen_features
from lightning_fcl.models.ridge import GroupMoments, RidgeReadout, add_to_diagonal, packed
from lightning_fcl.tasks.ridge_statistics import MOMENTS, SUMS, low_rank
from lightning_fcl.tasks.ridge_targets import OneHot, ReadoutTargets
from lightning_fcl.tasks.ridge_trainer import RidgeTrainer, Share
from lightning_fcl.tasks.task import Task, embedding_body


class RidgeTask(Task):
    """A readout by ridge regression: local training is one pass that adds up statistics.

    In a federation every round adds its clients' statistics to the server's (``share="statistics"``: IncFed, or FedRR;
    Bacciu et al. 2021), which solves for the readout: the same as one that sees all data at once. With
    ``share="weights"`` each client solves for its own readout and the server averages them (FedAvg). In a plain
    Trainer the last epoch of each fit adds its data, or each epoch (a round) of a `FederatedStream`. Rows of A, and
    so of the solution, are 0 for classes that nobody has seen yet.

    What (A, B) reveals: of a client with fewer samples than there are features, their span, and of one with a single
    sample that sample's features. Hence ``min_samples``; adding up under secure aggregation is the remedy.
    """

    regularised: Tensor
    """How many uploads' gamma is in B since the last solution."""
    why_not_unlearned: str | None
    """Why a client's part cannot be taken away again; None: it can."""

    def __init__(
        self,
        features: int,
        targets: ReadoutTargets,
        beta: float | list[float],
        share: Share | Literal["moments"],
        symmetric: bool,
        min_samples: int | None,
        rank: int | None = None,
        gamma: float = 0.0,
        groups: int = 5,
    ) -> None:
        super().__init__()
        one_of((*get_args(Share), "moments"), share=share)
        at_least(0, gamma=gamma)
        if (share != "statistics" and (rank is not None or gamma)) or (rank is not None and gamma):
            raise ValueError(
                'Expected `rank` or `gamma` alone, and with `share="statistics"`, as there is no B else to which they '
                f'apply, but got rank={rank} and gamma={gamma} with `share="{share}"`. Leave them out.'
            )
        self.betas = [beta] if isinstance(beta, int | float) else list(beta)
        if not self.betas:
            raise ValueError("Expected `beta` to be a number or several but got an empty list.")
        if len(self.betas) > 1 and share == "weights":
            raise ValueError(
                f'Expected one `beta` with `share="weights"`, as each client solves for itself, but got {self.betas}.'
            )
        self.automatic_optimization = False
        self.targets = targets
        self.readout = RidgeReadout(features, targets.outputs, self.betas[0], symmetric, rank)
        for beta in self.betas[1:]:
            RidgeReadout(1, 1, beta)  # refuses what is no regulariser
        self.share = share
        self.gamma = gamma
        self.statistics = MOMENTS if share == "moments" else SUMS if rank is None else low_rank(rank)
        means = "shares its weights: means cannot be taken apart"
        self.why_not_unlearned = means if share == "weights" else self.statistics.why_not_unlearned
        if share == "moments":
            self.moments = GroupMoments(groups, targets.outputs, features)
        if gamma:
            self.register_buffer("regularised", torch.zeros((), dtype=torch.long))
        self.min_samples = features if min_samples is None else min_samples
        self.val_metric, self.test_metric = targets.metric(), targets.metric()

    @property
    def reductions(self) -> Rules:
        """What travels: the sums and what is solved of them."""
        if self.share == "weights":
            own = dict.fromkeys(("readout.A", "readout.B", "readout.n", "readout.tag"), "none")
            return {"*": "fixed", **own, "readout.weight": "mean"}
        regularised = {"regularised": "sum"} if self.gamma else {}
        return {"*": "fixed", **self.statistics.reductions, **regularised, "readout.weight": "download"}

    # What becomes of a batch.

    def seen(self, x: Tensor) -> Iterator[Tensor]:
        """What the readout sees: blocks of shape (steps, batch, features)."""
        raise NotImplementedError

    def pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What the readout sees and should say: (steps, batch, features) and (steps, batch, outputs), by blocks."""
        targets = self.targets.encode(y)
        for states in self.seen(x):
            yield states, targets.expand(len(states), *targets.shape)

    def add(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor, sizes: Sequence[int]) -> list[int]:
        """Add samples, so many of each client after the other, to the clients' statistics; how many count for each."""
        samples = 0
        for states, wanted in self.pairs(x, y):
            samples += len(states)
            parts = zip(*(torch.split(values, list(sizes), dim=1) for values in (states, wanted)), strict=True)
            for row, (mine, said) in enumerate(parts):
                if mine.numel():
                    self.statistics.add(a[row], b[row], mine.flatten(0, 1), said.flatten(0, 1))
        return [samples * size for size in sizes]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        if self.counts():
            self.include(*batch)
        self.count_step()

    def include(self, x: Tensor, y: Tensor) -> None:
        """Add samples to the sums in the readout."""
        for states, wanted in self.pairs(x, y):
            self.readout.partial_fit(states.flatten(0, 1), wanted.flatten(0, 1))

    def count_step(self) -> None:
        """Move nothing, as no gradient is there: Lightning's checkpoints count optimizer steps."""
        self.optimizers().step()  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        if self.trainer.max_epochs == -1:
            raise ValueError(
                "Expected `max_epochs` to be a number but got -1: the readout learns in the last epoch of a fit."
            )

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int) -> None:
        if self.trainer.is_last_batch and self.counts() and federation_of(self.trainer) is None:
            self.solve()

    def counts(self) -> bool:
        """Whether the epoch's data are added: a stream's epochs are rounds, others see the same data again."""
        trainer = self.trainer
        return trainer.current_epoch + 1 == trainer.max_epochs or stream_of(trainer) is not None

    def on_after_aggregation(self) -> None:
        if self.share == "moments":  # what they tell of a round's clients is added to A and B
            readout, moments = self.readout, self.moments
            b = moments.second_moments()
            readout.A += moments.sums.sum(dim=0)
            readout.B += packed(b) if readout.symmetric else b
            self.moments = GroupMoments(moments.groups, *readout.A.shape).to(self.device)
        if self.share != "weights":
            self.solve()

    @torch.no_grad()
    def solve(self) -> None:
        """Set the readout's weights from its statistics, with the only regulariser or the best one."""
        if self.gamma:
            add_to_diagonal(self.readout.B, self.readout.in_features, -self.gamma * int(self.regularised))
            self.regularised.zero_()
        if len(self.betas) == 1:
            self.readout.solve()
            return
        trainer, stream = self.trainer, stream_of(self.trainer)
        loader: Any = trainer.val_dataloaders if stream is None else stream.val_dataloader()
        if not loader:
            raise ValueError(
                f"Expected validation samples to choose among the {len(self.betas)} values of `beta` but the stream "
                "has none. Set the stream's `validation`, or one `beta`."
            )
        solutions = self.readout.solutions(self.betas)
        right = torch.zeros(len(self.betas), dtype=torch.float64, device=self.device)
        for batch in loader:
            for states, wanted in self.pairs(*transfer_batch(trainer, batch)):
                outputs = states.double() @ solutions.flatten(0, 1).t()
                right += self.targets.score(outputs.view(*outputs.shape[:-1], *solutions.shape[:2]), wanted)
        best = int(right.argmax())
        self.readout.beta = self.betas[best]
        self.readout.weight.copy_(solutions[best])

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        metric = self.val_metric if stage == "val" else self.test_metric
        x, y = batch
        for states, wanted in self.pairs(x, y):
            metric.update(*self.targets.decode(self.readout(states), wanted))
        self.log(f"{stage}/{self.targets.quantity}", metric, batch_size=len(y))

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([{"params": [*self.parameters()]}], lr=0.0)  # nothing descends; a body may have none

    # What a federation asks for.

    def local_trainer(self, federation: RunsFederation, shaping: Sequence[str]) -> RidgeTrainer:
        """The trainer of the readouts of many clients; what a federation cannot do with sums is refused."""
        name, strategy, rules = type(self).__name__, federation.strategy, federation.strategy.rules
        if strategy.local_epochs != 1:
            raise ValueError(
                f"Expected the strategy's `local_epochs` to be 1 for a `{name}`, whose readout takes one pass, but got "
                f"{strategy.local_epochs}. The passes of plasticity are `IntrinsicPlasticity(local_epochs=...)`."
            )
        if reductions_of(self, rules) != reductions_of(self):
            raise ValueError(
                f"Expected no `reductions` with a `{name}`, which declares its own for each round, but got "
                f"{dict(rules)}. What clients send is chosen by `share`."
            )
        if shaping:
            raise ValueError(
                f"Expected no `{shaping[0]}` with a `{name}`: it adds to a loss, and a readout is solved for without "
                "one. Remove it."
            )
        if type(self).training_step is not RidgeTask.training_step:
            raise ValueError(
                f"Expected `{name}` not to override `training_step`: in a federation clients run through its body side "
                "by side. Override `pairs` instead."
            )
        return RidgeTrainer(self, strategy.cohort_size)

    @property
    def local_models(self) -> bool:
        """Whether a client's own state makes predictions: its statistics do not, before they are solved."""
        return self.share == "weights" or self.gamma > 0

    def fingerprint(self) -> dict[str, Any]:
        return {"betas": self.betas, "share": self.share} | ({"gamma": self.gamma} if self.gamma else {})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["beta"] = self.readout.beta

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if len(self.betas) > 1:
            self.readout.beta = checkpoint.get("beta", self.readout.beta)


class RidgeClassifier(RidgeTask):
    """Classification by ridge regression on the features of a network that stays. See `RidgeTask` for what it does.

    The network is always in evaluation mode: its features are the same in training and afterwards.
    `lightning_fcl.callbacks.BaseSession` trains it and adds the base session's samples.

    Args:
        model: The network. Its ``embed(x)`` gives the features, shape (batch, ``features``).
        num_classes: Number of classes.
        beta: Regulariser, at least 0; of several, the one that does best on the validation samples after each round.
        symmetric: Whether only the upper triangle of B is kept and sent.
        share: What a client sends: its ``"statistics"``; its own solution, the ``"weights"``; or the ``"moments"`` of
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
        groups: Groups that a client's samples fall into, with ``share="moments"``.

    Raises:
        ValueError: If an argument is out of range, does not go with ``share``, or the network has no such features.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> task = RidgeClassifier(DSICNet(), num_classes=10)
        >>> task(torch.zeros(2, 1, 64, 48)).shape, sum(v.nbytes for n, v in task.named_buffers() if n[-1] in "AB")
        (torch.Size([2, 10]), 32320)
    """

    gives: ClassVar[str] = "0/1"

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        beta: float | list[float] = 1.0,
        symmetric: bool = True,
        share: Share | Literal["moments"] = "statistics",
        min_samples: int | None = None,
        random_features: int | None = None,
        seed: int = 0,
        bias: bool = False,
        rank: int | None = None,
        gamma: float = 0.0,
        groups: int = 5,
    ) -> None:
        own = embedding_body(model).features
        features = (own if random_features is None else random_features) + bias
        super().__init__(features, OneHot(num_classes), beta, share, symmetric, min_samples, rank, gamma, groups)
        self.model = model.eval()
        self.random_features = None if random_features is None else RandomFeatures(own, random_features, seed)
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
        body: EmbedsSamples = embedding_body(self.model)
        return seen_features(body.embed(x), self.random_features, self.bias)

    def seen(self, x: Tensor) -> Iterator[Tensor]:
        yield self.embed(x)[None]

    def network(self) -> FeatureReadout:
        """A plain network that predicts as this task does now."""
        body, lift = copy.deepcopy((embedding_body(self.model), self.random_features))
        network = FeatureReadout(body, self.num_classes, lift, self.bias)
        network.weight.copy_(self.readout.weight)
        return network

    def on_base_session(self, x: Tensor, y: Tensor) -> None:
        """Add the base session's samples, and solve: the readout predicts before the first round."""
        self.include(x, y)
        self.readout.solve()
