"""Ridge regression on what a body that stays makes of samples: a few sums instead of weights, and nothing to forget."""

from __future__ import annotations

import logging
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
from lightning_fcl.tasks.base import Task
from lightning_fcl.tasks.ridge_statistics import MOMENTS, SUMS, ReadoutTargets, low_rank
from lightning_fcl.validation import at_least, one_of

log = logging.getLogger(__name__)

UploadKind = Literal["statistics", "weights"]
"""What a client of any ridge regression may send."""

# Of all statistics of a client group together, in bytes: where it is used up, fewer clients run side by side.
MAX_GROUP_BYTES = 128 * 2**20


class RidgeTask(Task):
    """A readout by ridge regression: local training is one pass that adds up statistics.

    In a federation every round adds its clients' statistics to the server's (``upload="statistics"``: IncFed, or FedRR;
    Bacciu et al. 2021), which solves for the readout: the same as one that sees all data at once. With
    ``upload="weights"`` each client solves for its own readout and the server averages them (FedAvg). In a plain
    Trainer the last epoch of each fit adds its data, or each epoch (a round) of a `FederatedStream`. Rows of A, and
    so of the solution, are 0 for classes that nobody has seen yet.

    What (A, B) reveals: of a client with fewer samples than there are features, their span, and of one with a single
    sample that sample's features. Hence ``min_samples``; adding up under secure aggregation is the remedy.
    """

    num_regularized: Tensor
    """How many uploads' gamma is in B since the last solution."""
    no_unlearning_reason: str | None
    """Why a client's part cannot be taken away again; None: it can."""

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
                'Expected `rank` or `gamma` alone, and with `upload="statistics"`, as there is no B else to which they '
                f'apply, but got rank={rank} and gamma={gamma} with `upload="{upload}"`.',
                hint='Leave `rank` or `gamma` out, or both. With one of them, use `upload="statistics"`.',
                argument="rank",
            )
        self.betas = [beta] if isinstance(beta, int | float) else list(beta)
        if not self.betas:
            raise InvalidValueError(
                "Expected `beta` to be a number or several but got an empty list.",
                hint="Pass a number, such as `beta=1.0`.",
                argument="beta",
            )
        if len(self.betas) > 1 and upload == "weights":
            raise InvalidValueError(
                f'Expected one `beta` with `upload="weights"`, as each client solves for itself, but got {self.betas}.',
                hint="Pass one number, or leave `upload` out.",
                argument="beta",
            )
        self.automatic_optimization = False
        self.targets = targets
        self.readout = RidgeReadout(features, targets.num_outputs, self.betas[0], symmetric, rank)
        for beta in self.betas[1:]:
            RidgeReadout(1, 1, beta)  # refuses what is no regulariser
        self.upload = upload
        self.gamma = gamma
        self.statistics = MOMENTS if upload == "moments" else SUMS if rank is None else low_rank(rank)
        means = "shares its weights: means cannot be taken apart"
        self.no_unlearning_reason = means if upload == "weights" else self.statistics.no_unlearning_reason
        if upload == "moments":
            self.moments = GroupMoments(groups, targets.num_outputs, features)
        if gamma:
            self.register_buffer("num_regularized", torch.zeros((), dtype=torch.long))
        self.min_samples = features if min_samples is None else min_samples
        self.val_metric, self.test_metric = targets.metric(), targets.metric()

    @property
    def reductions(self) -> ReductionRules:
        """What travels: the sums and what is solved of them."""
        if self.upload == "weights":
            local_rules = dict.fromkeys(("readout.A", "readout.B", "readout.n", "readout.tag"), "local")
            return {"*": "constant", **local_rules, "readout.weight": "mean"}
        regularization = {"num_regularized": "sum"} if self.gamma else {}
        return {"*": "constant", **self.statistics.reductions, **regularization, "readout.weight": "download_only"}

    # What becomes of a batch.

    def readout_inputs(self, x: Tensor) -> Iterator[Tensor]:
        """What the readout sees: blocks of shape (steps, batch, features)."""
        raise NotImplementedError

    def readout_pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What the readout sees and should say: (steps, batch, features) and (steps, batch, outputs), by blocks."""
        targets = self.targets.encode(y)
        for states in self.readout_inputs(x):
            yield states, targets.expand(len(states), *targets.shape)

    def accumulate_samples(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor, sizes: Sequence[int]) -> list[int]:
        """Add samples, so many of each client after the other, to the clients' statistics; how many count for each."""
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
        """Add samples to the sums in the readout."""
        for states, targets in self.readout_pairs(x, y):
            self.readout.partial_fit(states.flatten(0, 1), targets.flatten(0, 1))

    def add_global_step(self) -> None:
        """Move nothing, as no gradient is there: Lightning's checkpoints count optimizer steps."""
        self.optimizers().step()  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        if self.trainer.max_epochs == -1:
            raise InvalidValueError(
                "Expected `max_epochs` to be a number but got -1: the readout learns in the last epoch of a fit.",
                argument="max_epochs",
            )

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int) -> None:
        if self.trainer.is_last_batch and self.should_accumulate() and find_federation(self.trainer) is None:
            self.solve()

    def should_accumulate(self) -> bool:
        """Whether the epoch's data are added: a stream's epochs are rounds, others see the same data again."""
        trainer = self.trainer
        return trainer.current_epoch + 1 == trainer.max_epochs or find_stream(trainer) is not None

    def on_after_aggregation(self) -> None:
        if self.upload == "moments":  # what they tell of a round's clients is added to A and B
            readout, moments = self.readout, self.moments
            b = moments.second_moments()
            readout.A += moments.sums.sum(dim=0)
            readout.B += pack_upper(b) if readout.symmetric else b
            self.moments = GroupMoments(moments.groups, *readout.A.shape).to(self.device)
        if self.upload != "weights":
            self.solve()

    @torch.no_grad()
    def solve(self) -> None:
        """Set the readout's weights from its statistics, with the only regulariser or the best one."""
        if self.gamma:
            add_to_diagonal(self.readout.B, self.readout.in_features, -self.gamma * int(self.num_regularized))
            self.num_regularized.zero_()
        if len(self.betas) == 1:
            self.readout.solve()
            return
        trainer, stream = self.trainer, find_stream(self.trainer)
        loader: Any = trainer.val_dataloaders if stream is None else stream.val_dataloader()
        if not loader:
            raise InvalidValueError(
                f"Expected validation samples to choose among the {len(self.betas)} values of `beta` but "
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

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        metric = self.val_metric if stage == "val" else self.test_metric
        x, y = batch
        for states, targets in self.readout_pairs(x, y):
            metric.update(*self.targets.to_predictions(self.readout(states), targets))
        self.log(f"{stage}/{self.targets.quantity}", metric, batch_size=len(y))

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([{"params": [*self.parameters()]}], lr=0.0)  # nothing descends; a body may have none

    # What a federation asks for.

    def configure_local_trainer(self, federation: FederationProtocol, shaping: Sequence[str]) -> RidgeTrainer:
        """The trainer of the readouts of many clients; what a federation cannot do with sums is refused."""
        name, settings, rules = type(self).__name__, federation.settings, federation.settings.rules
        if settings.local_epochs != 1:
            raise InvalidValueError(
                f"Expected the strategy's `local_epochs` to be 1 for a `{name}`, whose readout takes one pass, but "
                f"got {settings.local_epochs}.",
                hint="Leave `local_epochs` out. To adapt the reservoir for more passes, use "
                "`IntrinsicPlasticity(local_epochs=...)`.",
                argument="local_epochs",
                value=settings.local_epochs,
            )
        if get_reductions(self, rules) != get_reductions(self):
            raise InvalidValueError(
                f"Expected no `reductions` with a `{name}`, which declares its own for each round, but got "
                f"{dict(rules)}.",
                hint="Leave `reductions` out. `upload` chooses the uploads.",
                argument="reductions",
                value=dict(rules),
            )
        if shaping:
            raise InvalidValueError(
                f"Expected no `{shaping[0]}` with a `{name}`: it adds to a loss, and a readout is solved for without "
                "one.",
                hint="Remove it.",
                argument="callbacks",
                value=shaping,
            )
        if type(self).training_step is not RidgeTask.training_step:
            raise InvalidValueError(
                f"Expected `{name}` not to override `training_step`: in a federation clients run through its body "
                "side by side.",
                hint="Override `readout_pairs` instead.",
                argument=name,
            )
        return RidgeTrainer(self, settings.max_vectorized_clients)

    @property
    def client_state_predicts(self) -> bool:
        """Whether a client's own state makes predictions: its statistics do not, before they are solved."""
        return self.upload == "weights" or self.gamma > 0

    def fingerprint(self) -> dict[str, Any]:
        return {"betas": self.betas, "share": self.upload} | ({"gamma": self.gamma} if self.gamma else {})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["beta"] = self.readout.beta

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if len(self.betas) > 1:
            self.readout.beta = checkpoint.get("beta", self.readout.beta)


class RidgeTrainer:
    """Runs several clients' samples through one body, and adds them to each one's sums."""

    is_stacked = True
    optimizer = None

    def __init__(self, module: RidgeTask, max_vectorized_clients: int | Literal["auto"] = "auto") -> None:
        self.module = module
        fitting = int(max(1, min(256, MAX_GROUP_BYTES // module.readout.B.nbytes)))
        self.num_vectorized_clients = fitting if max_vectorized_clients == "auto" else max_vectorized_clients
        self.client_rounds: Sequence[ClientRound] = ()
        self.memories: Sequence[Sequence[StateSection]] = ()
        self._a = self._b = torch.empty(0)
        self._room: dict[
            str, Tensor
        ] = {}  # for one client group's after the other: new memory would cost more than the work
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
        self._a, b = (self._stacked([self._begun(state, name) for state in states], name) for name in statistics.names)
        self._b = statistics.allocate_rows(b, clients)
        self._n = [int(self._begun(state, "readout.n")) for state in states]
        if self.module.gamma:  # what could not be sent holds it
            for row, state in zip(self._b, states, strict=True):
                add_to_diagonal(row, self._a.shape[-1], -self.module.gamma * int(state["num_regularized"]))

    def _begun(self, state: State, name: str) -> Tensor:
        """What a client's sums begin with: nothing, or what has stayed with it, if that is of the same body."""
        is_same_body = torch.equal(state["readout.tag"], self.module.readout.tag)
        return state[name] if is_same_body else torch.zeros_like(state[name])

    def _stacked(self, rows: list[Tensor], name: str) -> Tensor:
        room = self._room.get(name)
        if room is None or len(room) < len(rows) or room.device != rows[0].device:
            room = self._room[name] = torch.stack(rows)
            return room
        return torch.stack(rows, out=room[: len(rows)])

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> None:
        assert weight is not None  # batches are stacked
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
            if module.upload != "weights" and n < module.min_samples and client_round.client_id not in self._warned:
                self._warned.add(client_round.client_id)
                log.warning(
                    "The statistics of client %s are of %d samples, below `min_samples`=%d: they can reveal its data. "
                    "Wait for more, or use secure aggregation.",
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
    """A client's own weights, NaN if its statistics are not finite: it is left out, by name."""
    if torch.isfinite(a).all() and torch.isfinite(b).all():
        return solve(a, unpack_upper(b, a.shape[1]), beta)
    return torch.full_like(a, torch.nan)


def stack_client_rows(module: RidgeTask, clients: int) -> State:
    """A module's state, every entry of shape (clients, ...)."""
    return {name: value.expand(clients, *value.shape) for name, value in state_tensors(module).items()}
