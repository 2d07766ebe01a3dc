"""Ridge regression on the features of a frozen network, solved from the summed statistics of all clients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.trainer_access import find_stream, move_batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State, get_reductions, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.local_trainer import LocalResult
from lightning_fcl.federation.protocols import FederationProtocol, find_federation
from lightning_fcl.models.ridge import GroupMoments, RidgeReadout, add_to_diagonal, pack_upper, solve, unpack_upper
from lightning_fcl.privacy.differential_privacy import PrivacyAccount
from lightning_fcl.tasks.base import Task
from lightning_fcl.tasks.ridge_statistics import MOMENTS, SUMS, OneHot, ReadoutTargets, low_rank
from lightning_fcl.validation import at_least, one_of

log = logging.getLogger(__name__)

UploadKind = Literal["statistics", "weights"]
"""Kinds of upload that all ridge tasks support."""

TARGET_FACTOR = 4.0
"""Factor of A in the norm of a private contribution. A large factor reduces the noise on A, and increases it on B."""

# Maximum size in bytes of the statistics in a vectorized step. By default, this limits the number of clients per step.
MAX_GROUP_BYTES = 128 * 2**20


class RidgeTask(Task):
    """A readout that is trained by ridge regression. Local training is one pass that sums statistics.

    The statistics are ``A = Y^T S`` and ``B = S^T S``, where S contains the inputs of the readout and Y the targets. In
    a federation with ``upload="statistics"`` (IncFed, or FedRR; Bacciu et al. 2021), the server adds the clients'
    statistics of each round to its own statistics. It then solves for the readout. Without ``rank``, the readout equals
    the solution on the pooled data of all clients. With ``upload="weights"``, each client solves for its own readout,
    and the server averages these readouts (FedAvg).

    In a plain Trainer, only the last epoch of each fit adds its data. With a `FederatedStream`, each epoch is a round
    and adds its data. If the targets are 0 and 1, a class without samples so far has zeros in A and in the solution.

    A and B of a client can reveal its data: the span of its samples' features if it has fewer samples than features,
    and the features of the sample if it has a single sample. ``min_samples`` warns about such clients. Use secure
    aggregation to protect them.
    """

    num_regularized: Tensor
    """Number of uploads whose gamma was added to B since the last solution."""
    no_unlearning_reason: str | None
    """Reason why the statistics of a client cannot be subtracted. None: the statistics can be subtracted."""

    def __init__(
        self,
        features: int,
        targets: ReadoutTargets,
        beta: float | list[float],
        upload: UploadKind | Literal["moments"],
        symmetric: bool,
        min_samples: int | None,
        rank: int | None = None,
        gamma: float = 0.0,
        groups: int = 5,
    ) -> None:
        super().__init__()
        one_of((*get_args(UploadKind), "moments"), upload=upload)
        at_least(0, gamma=gamma)
        if (upload != "statistics" and (rank is not None or gamma)) or (rank is not None and gamma):
            raise InvalidValueError(
                'Expected at most one of `rank` and `gamma`, and only with `upload="statistics"`, which uploads B, but '
                f'got rank={rank} and gamma={gamma} with `upload="{upload}"`.',
                hint='Leave `rank` or `gamma` out, or both. With one of them, use `upload="statistics"`.',
                argument="rank",
            )
        self.betas = [beta] if isinstance(beta, int | float) else list(beta)
        if not self.betas:
            raise InvalidValueError(
                "Expected `beta` to be a number or a list of numbers, but got an empty list.",
                hint="Pass a number, such as `beta=1.0`.",
                argument="beta",
            )
        if len(self.betas) > 1 and upload == "weights":
            raise InvalidValueError(
                'Expected one `beta` with `upload="weights"`, because each client computes its own solution, but got '
                f"{self.betas}.",
                hint="Pass one number, or leave `upload` out.",
                argument="beta",
            )
        self.automatic_optimization = False
        self.targets = targets
        self.readout = RidgeReadout(features, targets.num_outputs, self.betas[0], symmetric, rank)
        for beta in self.betas[1:]:
            # The constructor raises an error if the value is invalid.
            RidgeReadout(1, 1, beta)
        self.upload = upload
        self.gamma = gamma
        self.statistics = MOMENTS if upload == "moments" else SUMS if rank is None else low_rank(rank)
        means = "uploads weights: a client cannot be removed from their mean"
        self.no_unlearning_reason = means if upload == "weights" else self.statistics.no_unlearning_reason
        if upload == "moments":
            self.moments = GroupMoments(groups, targets.num_outputs, features)
        if gamma:
            self.register_buffer("num_regularized", torch.zeros((), dtype=torch.long))
        # The account of differential privacy. None: A and B contain no noise.
        self.privacy: PrivacyAccount | None = None
        self.min_samples = features if min_samples is None else min_samples
        self.val_metric, self.test_metric = targets.metric(), targets.metric()

    @property
    def reductions(self) -> ReductionRules:
        """Reductions of the statistics, of the number of samples and of the solution."""
        if self.upload == "weights":
            local_rules = dict.fromkeys(("readout.A", "readout.B", "readout.n", "readout.tag"), "local")
            return {"*": "constant", **local_rules, "readout.weight": "mean"}
        if self.privacy is not None:  # The number of samples is not uploaded, because it has no noise.
            return {"*": "constant", **dict.fromkeys(self.statistics.names, "sum"), "readout.weight": "download_only"}
        regularization = {"num_regularized": "sum"} if self.gamma else {}
        return {"*": "constant", **self.statistics.reductions, **regularization, "readout.weight": "download_only"}

    # Training on batches.

    def readout_inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of the readout in blocks of shape (steps, batch, features)."""
        raise NotImplementedError

    def readout_pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs (steps, batch, features) and targets (steps, batch, outputs) of the readout in blocks."""
        targets = self.targets.encode(y)
        for states in self.readout_inputs(x):
            yield states, targets.expand(len(states), *targets.shape)

    def accumulate_samples(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor, sizes: Sequence[int]) -> list[int]:
        """Add the samples of several clients to the statistics of these clients.

        Args:
            a: First statistic of each client, shape (clients, ...).
            b: Second statistic of each client, shape (clients, ...).
            x: Samples of all clients, ordered by client.
            y: Targets of the samples.
            sizes: Number of samples of each client.

        Returns:
            Number of readout inputs that were added for each client. A sample has one input, or one for each time step
            that the readout uses.
        """
        samples = 0
        for states, targets in self.readout_pairs(x, y):
            samples += len(states)
            parts = zip(*(torch.split(values, list(sizes), dim=1) for values in (states, targets)), strict=True)
            for row, (client_states, client_targets) in enumerate(parts):
                if client_states.numel():
                    self.statistics.add(a[row], b[row], client_states.flatten(0, 1), client_targets.flatten(0, 1))
        return [samples * size for size in sizes]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        if self.should_accumulate():
            self.add_samples(*batch)
        self.add_global_step()

    def add_samples(self, x: Tensor, y: Tensor) -> None:
        """Add samples to the statistics of the readout."""
        for states, targets in self.readout_pairs(x, y):
            self.readout.partial_fit(states.flatten(0, 1), targets.flatten(0, 1))

    def add_global_step(self) -> None:
        """Count a step without a gradient, because Lightning's checkpoints count optimizer steps."""
        self.optimizers().step()  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        if self.trainer.max_epochs == -1:
            raise InvalidValueError(
                "Expected `max_epochs` to limit the epochs, but got -1, which means no limit. The readout is trained "
                "in the last epoch of a fit.",
                argument="max_epochs",
            )

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int) -> None:
        if self.trainer.is_last_batch and self.should_accumulate() and find_federation(self.trainer) is None:
            self.solve()

    def should_accumulate(self) -> bool:
        """Return whether the data of the current epoch are added to the statistics.

        With a `FederatedStream`, each epoch is a round, and the data of each round are added. Otherwise, all epochs
        have the same data, so only the data of the last epoch are added.
        """
        trainer = self.trainer
        return trainer.current_epoch + 1 == trainer.max_epochs or find_stream(trainer) is not None

    def on_after_aggregation(self) -> None:
        # Moments contain the samples of one round, so A and B are updated from them.
        if self.upload == "moments":
            readout, moments = self.readout, self.moments
            b = moments.second_moments()
            readout.A += moments.sums.sum(dim=0)
            readout.B += pack_upper(b) if readout.symmetric else b
            self.moments = GroupMoments(moments.groups, *readout.A.shape).to(self.device)
        if self.upload != "weights":
            self.solve()

    @torch.no_grad()
    def solve(self) -> None:
        """Set the weights of the readout from its statistics, with the best of several values of ``beta``."""
        if self.gamma:
            add_to_diagonal(self.readout.B, self.readout.in_features, -self.gamma * int(self.num_regularized))
            self.num_regularized.zero_()
        if self.privacy is not None and self.privacy.noise_multiplier > 0:
            self.readout.solve_noised(self.private_beta)
            return
        if len(self.betas) == 1:
            self.readout.solve()
            return
        trainer, stream = self.trainer, find_stream(self.trainer)
        loader: Any = trainer.val_dataloaders if stream is None else stream.val_dataloader()
        if not loader:
            raise InvalidValueError(
                f"Expected validation samples to choose among the {len(self.betas)} values of `beta`, but "
                f"{'the fit' if stream is None else 'the stream'} has none.",
                hint="Pass `val_dataloaders` to `fit`, or one `beta`."
                if stream is None
                else "Set `split=Split(validation=0.1)` of the stream, or pass one `beta`.",
                argument="beta",
            )
        solutions = self.readout.solve_path(self.betas)
        right = torch.zeros(len(self.betas), dtype=torch.float64, device=self.device)
        for batch in loader:
            for states, targets in self.readout_pairs(*move_batch(trainer, batch)):
                outputs = states.double() @ solutions.flatten(0, 1).t()
                right += self.targets.score(outputs.view(*outputs.shape[:-1], *solutions.shape[:2]), targets)
        best = int(right.argmax())
        self.readout.beta = self.betas[best]
        self.readout.weight.copy_(solutions[best])

    # Differential privacy.

    @property
    def private_sums_obstacle(self) -> str:
        """The reason why A and B cannot be released with differential privacy, as a clause. Empty: there is none."""
        if self.statistics is not SUMS or self.upload != "statistics" or self.gamma:
            return 'it uploads other values than A and B. Use `upload="statistics"` without `rank` and `gamma`'
        if not isinstance(self.targets, OneHot) or self.targets.signed:
            return "its targets are not one-hot classes. Use a `RidgeClassifier`"
        if len(self.betas) > 1:
            return "it selects `beta` with validation samples. Pass one `beta`, which is replaced by a computed value"
        return ""

    def private_scales(self, round_idx: int) -> dict[str, Tensor]:
        """Return factors for A and B: the joint norm of a contribution is computed after the multiplication.

        A sample with the features h of norm 1 then contributes ``(h h^T, 4 y h^T)`` with the joint Frobenius norm
        ``sqrt(17)``. Off-diagonal elements of a packed B count twice. The factor is infinite for the rows of A of
        classes that are not in the experiences of the round, so that these rows get no noise.
        """
        readout, stream = self.readout, find_stream(self.trainer)
        assert stream is not None  # `FederatedStrategy` requires a stream
        rows = torch.full((readout.A.shape[0], 1), TARGET_FACTOR, dtype=torch.float64)
        current = stream.plan.current_classes(round_idx)
        if current is not None:
            rows[[label for label in range(len(rows)) if label not in set(current)]] = torch.inf
        columns = torch.ones(readout.in_features, readout.in_features, dtype=torch.float64)
        if readout.symmetric:
            columns = pack_upper(math.sqrt(2) - (math.sqrt(2) - 1) * torch.eye(readout.in_features).double())
        return {"readout.A": rows.expand_as(readout.A), "readout.B": columns}

    @property
    def private_beta(self) -> float:
        """The regularizer for noised statistics, from the noise alone: ``2 s sqrt(2 d)``.

        d is the number of features. s is the standard deviation of the noise on the diagonal of B, from all releases.
        """
        assert self.privacy is not None
        return 2 * self.privacy.summed_deviation * math.sqrt(2 * self.readout.in_features)

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        metric = self.val_metric if stage == "val" else self.test_metric
        x, y = batch
        for states, targets in self.readout_pairs(x, y):
            metric.update(*self.targets.to_predictions(self.readout(states), targets))
        self.log(f"{stage}/{self.targets.quantity}", metric, batch_size=len(y))

    def configure_optimizers(self) -> Optimizer:
        # The learning rate is 0 because no gradient is computed. SGD rejects an empty list, but not an empty group.
        return torch.optim.SGD([{"params": [*self.parameters()]}], lr=0.0)

    # Federated training.

    def configure_local_trainer(self, federation: FederationProtocol, shaping: Sequence[str]) -> RidgeTrainer:
        """Return a local trainer for the readouts of several clients.

        Raises:
            ValueError: If `local_epochs` is not 1, `reductions` are set, a method changes the loss, or the task
                overrides `training_step`.
        """
        name, settings, rules = type(self).__name__, federation.settings, federation.settings.rules
        if settings.local_epochs != 1:
            raise InvalidValueError(
                f"Expected the strategy's `local_epochs` to be 1 for a `{name}`, whose readout needs one pass, but "
                f"got {settings.local_epochs}.",
                hint="Leave `local_epochs` out. To adapt a reservoir for more passes, use "
                "`IntrinsicPlasticity(local_epochs=...)`.",
                argument="local_epochs",
                value=settings.local_epochs,
            )
        if get_reductions(self, rules) != get_reductions(self):
            raise InvalidValueError(
                f"Expected no `reductions` with a `{name}`, which defines the reductions of each round, but got "
                f"{dict(rules)}.",
                hint="Leave `reductions` out. The task's `upload` selects what clients upload.",
                argument="reductions",
                value=dict(rules),
            )
        if shaping:
            raise InvalidValueError(
                f"Expected no `{shaping[0]}` with a `{name}`. `{shaping[0]}` changes a loss, but a readout is computed "
                "without a loss.",
                hint=f"Remove `{shaping[0]}`.",
                argument="callbacks",
                value=shaping,
            )
        if type(self).training_step is not RidgeTask.training_step:
            raise InvalidValueError(
                f"Expected `{name}` not to override `training_step`, because a federation trains several clients in "
                "one step.",
                hint="Override `readout_pairs` instead.",
                argument=name,
            )
        return RidgeTrainer(self, settings.max_vectorized_clients)

    @property
    def client_state_predicts(self) -> bool:
        """Whether each client solves for its own readout, so that the client's state can make predictions."""
        return self.upload == "weights" or self.gamma > 0

    def fingerprint(self) -> dict[str, Any]:
        return {"betas": self.betas, "share": self.upload} | ({"gamma": self.gamma} if self.gamma else {})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["beta"] = self.readout.beta

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if len(self.betas) > 1:
            self.readout.beta = checkpoint.get("beta", self.readout.beta)


class RidgeTrainer:
    """A local trainer for several clients: each step adds the features of samples to the clients' statistics."""

    is_stacked = True
    optimizer = None

    def __init__(self, module: RidgeTask, max_vectorized_clients: int | Literal["auto"] = "auto") -> None:
        self.module = module
        fitting = int(max(1, min(256, MAX_GROUP_BYTES // module.readout.B.nbytes)))
        self.num_vectorized_clients = fitting if max_vectorized_clients == "auto" else max_vectorized_clients
        self.client_rounds: Sequence[ClientRound] = ()
        self.memories: Sequence[Sequence[StateSection]] = ()
        self._a = self._b = torch.empty(0)
        # All client groups use these buffers, because allocating memory would take longer than the computation.
        self._stack_buffers: dict[str, Tensor] = {}
        self._n: list[int] = []
        self._warned: set[str] = set()

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        self.client_rounds, self.memories = clients, method_states
        statistics = self.module.statistics
        self._a, b = (
            self._stacked([self._initial_statistic(state, name) for state in states], name) for name in statistics.names
        )
        self._b = statistics.allocate_rows(b, clients)
        self._n = [int(self._initial_statistic(state, "readout.n")) for state in states]
        # If an upload did not reach the server, the client's statistics contain gamma. Subtract it.
        if self.module.gamma:
            for row, state in zip(self._b, states, strict=True):
                add_to_diagonal(row, self._a.shape[-1], -self.module.gamma * int(state["num_regularized"]))

    def _initial_statistic(self, state: State, name: str) -> Tensor:
        """Return a client's statistic from earlier rounds if it belongs to the current network, and otherwise zeros."""
        is_same_body = torch.equal(state["readout.tag"], self.module.readout.tag)
        return state[name] if is_same_body else torch.zeros_like(state[name])

    def _stacked(self, rows: list[Tensor], name: str) -> Tensor:
        """Return the stacked rows in a buffer that later calls reuse."""
        buffer = self._stack_buffers.get(name)
        if buffer is None or len(buffer) < len(rows) or buffer.device != rows[0].device:
            buffer = self._stack_buffers[name] = torch.stack(rows)
            return buffer
        return torch.stack(rows, out=buffer[: len(rows)])

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> None:
        # Batches are stacked, so they have weights.
        assert weight is not None
        (x, y), real = batch, weight > 0
        for row, new in enumerate(
            self.module.accumulate_samples(self._a, self._b, x[real], y[real], real.sum(dim=1).tolist())
        ):
            self._n[row] += new
        self.module.add_global_step()

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        return step()

    def finish(self) -> LocalResult:
        module = self.module
        for client_round, n in zip(self.client_rounds, self._n, strict=True):
            reveals = module.upload != "weights" and module.privacy is None and n < module.min_samples
            if reveals and client_round.client_id not in self._warned:
                self._warned.add(client_round.client_id)
                log.warning(
                    "Client %s uploads statistics that can reveal its data. The number of samples is %d, below "
                    "`min_samples`=%d. Give the client more samples, or leave the client out.",
                    client_round.client_id,
                    n,
                    module.min_samples,
                )
        a_name, b_name = module.statistics.names
        changed_state = {
            a_name: self._a,
            b_name: module.statistics.finish(self._b),
            "readout.n": torch.tensor(self._n, device=self._a.device),
        }
        if module.client_state_predicts:
            beta, client_statistics = module.gamma or module.readout.beta, zip(self._a, self._b, strict=True)
            changed_state["readout.weight"] = torch.stack([solve_local(a, b, beta) for a, b in client_statistics])
        if module.gamma:
            for row in self._b:
                add_to_diagonal(row, self._a.shape[-1], module.gamma)
            changed_state["num_regularized"] = torch.ones(len(self._b), dtype=torch.long, device=self._a.device)
        return LocalResult(stack_client_rows(module, len(self.client_rounds)) | changed_state, self.memories)


def solve_local(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """Return a client's weights. Return NaN for non-finite statistics, so that the server drops the upload."""
    if torch.isfinite(a).all() and torch.isfinite(b).all():
        return solve(a, unpack_upper(b, a.shape[1]), beta)
    return torch.full_like(a, torch.nan)


def stack_client_rows(module: RidgeTask, clients: int) -> State:
    """Return the state of a module, repeated for several clients. Each tensor has shape (clients, ...)."""
    return {name: value.expand(clients, *value.shape) for name, value in state_tensors(module).items()}
