"""FederatedStrategy: a Lightning Trainer whose epochs are rounds of many clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pickle import UnpicklingError
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.data.client_round import ClientRound, current_round
from lightning_fcl.data.stream import ClientLoader, FederatedStream
from lightning_fcl.federation.aggregation import Reduction, State, entries, hparams_of, load_entries, reductions_of
from lightning_fcl.federation.client_store import ClientStore, Memory
from lightning_fcl.federation.compression import Compression
from lightning_fcl.federation.server import ClientWeights, FederatedServer, OptimizerFactory, own_entries
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.methods.method import Method, methods_of
from lightning_fcl.randomness import seed_of, start_randomness
from lightning_fcl.simulation.limits import refuse_stream, refuse_trainer
from lightning_fcl.simulation.loader import BatchContext, RoundLoader, fingerprint
from lightning_fcl.simulation.vectorized import RANDOM, Cohort, ReservoirCohort, automatic_size, why_not_vectorized
from lightning_fcl.tasks.classification import Classifier
from lightning_fcl.tasks.reservoir import ReservoirTask

log = logging.getLogger(__name__)


class FederatedStrategy(SingleDeviceStrategy):
    """Trains a federation: one epoch is one round, one `trainer.fit` the whole stream.

    In a round the participating clients download the server state, train on their own data for some local epochs, and
    upload; the uploads are brought together as each entry's reduction says. The server state stands in the
    LightningModule after the last client, before validation and every epoch-end hook. What is not in the module's
    `state_dict`, such as non-persistent buffers, belongs to no client and goes from one to the next.

    Args:
        participation: Clients per round, drawn anew each round: a float is a share (1.0: all), an int a number; at
            least one.
        local_epochs: Passes over a client's data per round.
        client_weights: A client's weight in means: its ``"samples"`` of the round, all it ``"trained"`` on (these and
            the remembered ones), ``"uniform"``, or a number each.
        reductions: Pattern of state entries -> reduction (`lightning_fcl.federation.reductions`), as in
            ``{"head.*": "none"}``. It goes over the module's own ``reductions`` attribute, if it has one.
        server_optimizer: Makes a `torch.optim` optimizer that steps the server on the pseudo-gradient.
        trim: Fraction cut at each end by the ``trimmed_mean`` reduction.
        byzantine: Number of lying clients that the ``krum`` reduction allows for.
        cohort_size: Clients that train in one vectorised step; ``"auto"`` chooses, 1 trains one at a time.
        client_store: Where clients' states are kept between rounds: ``"memory"`` or ``"disk"``.
        keep_optimizer: Whether a client's optimizer state lasts from round to round.
        swarm: Makes it a swarm: one of the clients stands in for the server, and some may miss a synchronisation.
        compression: Code of the uploads: `lightning_fcl.federation.compression.TopK` or `Quantize`. It applies to
            trainable parameters whose reduction is ``mean``; what it leaves over stays with the client for its next
            upload.
        seed: Seed of participation and of every client's randomness; None takes `lightning.seed_everything`'s, else 0.
        accelerator: As in Lightning's strategies.
        checkpoint_io: As in Lightning's strategies.
        precision_plugin: As in Lightning's strategies.

    Raises:
        ValueError: If an argument is out of range, or the Trainer asks for what a federation cannot honour.
        TypeError: If ``compression`` is something else.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(strategy=FederatedStrategy(participation=0.5), logger=False, barebones=True)
        >>> trainer.strategy.participation
        0.5
    """

    strategy_name = "federated"

    def __init__(
        self,
        participation: int | float = 1.0,  # jsonargparse takes the first type that fits: 3 is a number, 0.3 a share
        local_epochs: int = 1,
        client_weights: ClientWeights = "samples",
        reductions: dict[str, str | Reduction] | None = None,
        server_optimizer: OptimizerFactory | None = None,
        trim: float = 0.1,
        byzantine: int = 0,
        cohort_size: int | Literal["auto"] = "auto",
        client_store: Literal["memory", "disk"] = "memory",
        keep_optimizer: bool = False,
        swarm: Swarm | None = None,
        compression: Compression | None = None,
        seed: int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        if not participation > 0 or (isinstance(participation, float) and participation > 1):
            raise ValueError(
                f"Expected `participation` to be a share above 0 and up to 1.0, or a number of clients, but got "
                f"{participation}."
            )
        if local_epochs < 1:
            raise ValueError(f"Expected `local_epochs` to be at least 1 but got {local_epochs}.")
        if cohort_size != "auto" and cohort_size < 1:
            raise ValueError(f'Expected `cohort_size` to be "auto" or at least 1 but got {cohort_size}.')
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(
                f"Expected `compression` to be a `Compression`, such as `TopK(0.1)`, or None but got {compression!r}."
            )
        if compression is not None and swarm is not None and (swarm.dropout or swarm.missing):
            raise ValueError(
                f"Expected a `swarm` without `dropout` and `missing` beside `compression` but got {swarm.settings()}: "
                "who has missed a synchronisation knows no server state that its update could refer to. Leave one out."
            )
        self.participation = participation
        self.local_epochs = local_epochs
        self.reductions = reductions or {}
        self.cohort_size = cohort_size
        self.keep_optimizer = keep_optimizer
        self.swarm = swarm
        store = ClientStore(client_store)
        self.server = FederatedServer(store, client_weights, server_optimizer, trim, byzantine, compression)
        self.stream: FederatedStream | None = None
        self.client_round: ClientRound | None = None
        self.cohort: Cohort | ReservoirCohort | None = None
        self.cohort_clients = 1
        self.between_rounds = self._round_done = True
        self.absent: set[str] = set()  # clients that take no part any more
        self._seed = seed
        self._parallel_devices: list[torch.device] = []
        self._batches: RoundLoader | None = None
        self._slot: BatchContext | None = None
        self._memories: list[list[Memory]] = []
        self._rehearsing: list[Method] = []
        self._base_optimizers: list[Optimizer] = []
        self._rounds = _Rounds(self)
        self._master: str | None = None  # of the last round
        self._server: State | None = None  # the server's, while a client's model is in the module after a fit

    @property
    def seed(self) -> int:
        """The seed of participation and of every client's randomness."""
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that the Trainer chose; a federation uses one."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._parallel_devices = devices
        if devices:
            self._root_device = devices[0]

    @property
    def local_epoch(self) -> int:
        """The local epoch, from 0, that the batch at hand belongs to."""
        return self._slot.epoch if self._slot is not None else 0

    @property
    def last_batch(self) -> bool:
        """Whether the batch at hand is the last one of its clients' local training."""
        return self._slot is not None and self._slot.last

    # The clients' own models.

    def client_state(self, client: str, server: State | None = None) -> State:
        """The state that a client predicts with: the server's with its own entries, made personal by its methods.

        Args:
            client: The client.
            server: The server's state; None: that in the module, or that `load_client` has found there. It comes back
                itself for a client with nothing of its own.

        Raises:
            ValueError: If there is no such client.
        """
        module = self.lightning_module
        if module is None or self.stream is None or client not in self.stream.plan.clients:
            known = ", ".join(self.stream.plan.clients) if self.stream is not None else "none before a fit"
            raise ValueError(f"Expected `client` to be one of the stream's ({known}) but got {client}.")
        state = server if server is not None else self._server if self._server is not None else entries(module)
        kept = self.server.store[client]
        own = own_entries(kept, module.device)
        if own:
            state = {**state, **own}
        for method in methods_of(module.trainer):
            state = method.personal(kept.get(section_of(method), {}), state)
        return state

    def load_client(self, client: str) -> None:
        """Put the model that a client predicts with into the module, in place of the server's: after a fit.

        Another fit goes on from the server's.

        Raises:
            ValueError: If there is no such client.
        """
        state = {name: value.detach().clone() for name, value in self.client_state(client).items()}
        module = self.lightning_module
        assert module is not None
        if self._server is None:
            self._server = {name: value.detach().clone() for name, value in entries(module).items()}
        load_entries(module, state)

    # Lightning's side.

    def connect(self, model: L.LightningModule) -> None:
        """Add the callback that begins and ends clients and rounds, before any state is restored."""
        super().connect(model)
        callbacks: list[Callback] = model.trainer.callbacks  # type: ignore[attr-defined]
        if self._rounds not in callbacks:
            callbacks.insert(0, self._rounds)

    def setup(self, trainer: L.Trainer) -> None:
        """Refuse what a federation cannot honour, then set up as any strategy."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            refuse_trainer(trainer, len(self.parallel_devices))
        else:
            self._warn_of_own_entries()

    def _warn_of_own_entries(self) -> None:
        module = self.lightning_module
        assert module is not None
        rules = reductions_of(module, self.reductions)
        own = [name for name, p in module.named_parameters() if p.requires_grad and rules[name].own]
        if own and self._server is None:
            log.warning(
                "This is the server's model, whose %s%s no client has trained: each keeps its own. "
                "`trainer.strategy.load_client(client)` puts a client's model in its place.",
                own[0],
                " (and more)" if len(own) > 1 else "",
            )

    def process_dataloader(self, dataloader: object) -> object:
        """Turn the clients' training data into the batches of each round."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if isinstance(dataloader, ClientLoader):
            self.stream = dataloader.stream
            self._check_stream()
            self.cohort_clients = self._clients_per_step(self.lightning_module)
            self._rehearsing = [method for method in methods_of(trainer) if method.rehearses]
            self._batches = RoundLoader(
                self.stream,
                lambda: current_round(trainer),
                self.participation,
                lambda: self.gone(current_round(trainer)),
                self._epochs,
                self.seed,
                self.cohort_clients,
                isinstance(self.lightning_module, ReservoirTask) or self.cohort_clients > 1,
                self._rehearsed,
            )
            return self._batches
        if trainer.training and self.stream is None:
            raise ValueError(
                f"Expected a `FederatedStream` as the Trainer's `datamodule` but got a {type(dataloader).__name__}. "
                "`FederatedStream.from_arrays(x, y, client=...)` makes one of your own data."
            )
        return dataloader

    def gone(self, round: int) -> set[str]:
        """The clients that take no part any more."""
        return self.absent | (self.swarm.gone(round) if self.swarm is not None else set())

    def _check_stream(self) -> None:
        assert self.stream is not None and self.lightning_module is not None
        trainer, plan = self.lightning_module.trainer, self.stream.plan
        refuse_stream(trainer, self.stream)
        named = [c for m in methods_of(trainer) if not isinstance(m.clients, str) for c in m.clients]
        self.server.check_clients(plan.clients, [*named, *(self.swarm.nodes if self.swarm else ())])

    def _clients_per_step(self, module: L.LightningModule) -> int:
        """Clients that train in one vectorised step, as far as the module and the Trainer allow it."""
        if not self.optimizers:
            raise ValueError(
                "Expected `configure_optimizers` not to ask for `trainer.estimated_stepping_batches`: the steps of a "
                "federation are not known beforehand. Count rounds, `trainer.max_epochs`."
            )
        if isinstance(module, ReservoirTask):
            module.check_federation(methods_of(module.trainer), self.reductions)
            if self.swarm is not None and (self.swarm.dropout or self.swarm.missing):
                raise ValueError(
                    f"Expected a `swarm` without `dropout` and `missing` for a `{type(module).__name__}`, whose "
                    f"clients begin each round with new sums, but got {self.swarm.settings()}. Leave them out."
                )
            return module.clients_at_once() if self.cohort_size == "auto" else self.cohort_size
        if self.cohort_size == 1:
            return 1
        size = automatic_size(module) if self.cohort_size == "auto" else self.cohort_size
        reason = "each client keeps its optimizer" if self.keep_optimizer else None
        if size > 1:
            assert self.stream is not None
            reason = reason or why_not_vectorized(module, self.optimizers[0], self.stream)
        if self.cohort_size == "auto":
            return 1 if reason else size
        if reason == RANDOM:
            log.warning("Random layers draw other numbers in a cohort than one by one: the result will differ.")
        elif reason:
            raise ValueError(f'Expected `cohort_size=1` or "auto" but got {self.cohort_size}: {reason}.')
        return size

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step of a client, as the module has it; or one of a whole cohort."""
        if self.cohort is None:
            return super().training_step(*args, **kwargs)
        return self.cohort.training_step(args[0])

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step; clients of a cohort that have no batches left stay as they are."""
        assert self._slot is not None
        cohort, active = self.cohort, self._slot.active
        cohort = cohort if isinstance(cohort, Cohort) else None
        frozen = cohort.freeze(active) if cohort is not None and active < len(self._slot.client_rounds) else None
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if cohort is not None and frozen is not None:
            cohort.thaw(frozen, active)
        return result

    # Checkpoints.

    def belongs_to(self) -> dict[str, Any]:
        """What makes this federation the one that it is: a checkpoint of another one cannot continue it."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stream = self.stream or trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(stream, FederatedStream):
            raise ValueError(f"Expected a `FederatedStream` as the Trainer's `datamodule` but got {stream}.")
        return {
            "model": type(self.lightning_module).__name__,
            "task": self.lightning_module.settings() if isinstance(self.lightning_module, ReservoirTask) else {},
            "methods": {section_of(method): method.settings() for method in methods_of(trainer)},
            "data": fingerprint(stream.plan),
            "batches": {"size": stream.batch_size, "shuffle": stream.shuffle, "drop_last": stream.drop_last},
            "local_epochs": self.local_epochs,
            "participation": self.participation,
            "client_weights": self.server.client_weights,
            "reductions": hparams_of(self.reductions),
            "robust": {"trim": self.server.trim, "byzantine": self.server.byzantine},
            "server_optimizer": self.server.has_server_optimizer,
            "keep_optimizer": self.keep_optimizer,
            "swarm": self.swarm.settings() if self.swarm else None,
            "compression": self.server.compression.settings() if self.server.compression else None,
            "seed": self.seed,
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; to continue a fit, refuse one that this federation cannot continue."""
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        except FileNotFoundError:
            raise
        except (RuntimeError, EOFError, OSError, KeyError, UnpicklingError) as error:
            raise ValueError(
                f"Expected a whole checkpoint of tensors and plain values at {checkpoint_path} but could not read it "
                f"({str(error).splitlines()[0]}). Continue from an earlier one."
            ) from error
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn != "fit":
            return checkpoint
        kept = checkpoint.get("callbacks", {}).get(self._rounds.state_key)
        if "optimizer_states" not in checkpoint:
            raise ValueError(
                f"Expected a whole checkpoint but {checkpoint_path} holds weights only. Save it without "
                "`save_weights_only`."
            )
        if kept is None:
            raise ValueError(
                f"Expected a federation's checkpoint but {checkpoint_path} was written by another strategy."
            )
        if not kept["between_rounds"]:
            raise ValueError(
                f"Expected a checkpoint taken between rounds but {checkpoint_path} was taken in the middle of one. "
                "Save with `every_n_epochs`, not `every_n_train_steps`."
            )
        here = self.belongs_to()
        other = {name: (value, here[name]) for name, value in kept["belongs_to"].items() if value != here.get(name)}
        if other:
            what = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in other.items())
            raise ValueError(
                f"Expected a checkpoint of this recipe but {checkpoint_path} is of another: {what}. Continue with the "
                "recipe that wrote it, or start without `ckpt_path`."
            )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the server state; what has been gathered by ``cat`` comes in its own length."""
        assert self.lightning_module is not None
        module, state = self.lightning_module, checkpoint["state_dict"]
        known = entries(module)
        reductions = reductions_of(module, self.reductions)
        for name, tensor in known.items():
            if reductions[name].resizes and name in state:
                tensor.data = state[name].to(tensor.device, copy=True)
        super().load_model_state_dict(checkpoint, strict)
        self._server = None

    # The round, step by step.

    def next_slot(self) -> None:
        """Before a batch: whose it is."""
        assert self._batches is not None
        self._slot = self._batches.slots.popleft()
        if self._slot.first:
            self.begin_clients(self._slot)
        if self.cohort is not None:
            assert self._slot.weight is not None
            self.cohort.weight = self._slot.weight.to(self.root_device)

    def end_slot(self) -> None:
        """After a batch: perhaps its clients are done, perhaps the round."""
        assert self._slot is not None
        if self._slot.last:
            self.end_clients(self._slot)
        if self._slot.last_of_round:
            self.end_round()

    def begin_fit(self) -> None:
        """Take the module's state as the server's."""
        assert self.lightning_module is not None
        if self._server is not None:
            load_entries(self.lightning_module, self._server)
            self._server = None
        self.server.begin(self.lightning_module, self.reductions)
        self._base_optimizers = self.optimizers

    def _rehearsed(self, client_round: ClientRound) -> list[Tensor]:
        if not self._rehearsing:
            return []
        kept = self.server.store[client_round.client]
        remembered = [m.rehearse(kept.get(section_of(m), {})) for m in self._rehearsing if m.applies_to(client_round)]
        pairs = [pair for pair in remembered if pair is not None]
        return [torch.cat(values) for values in zip(*pairs, strict=True)]

    def _epochs(self, client_round: ClientRound) -> int:
        assert self.lightning_module is not None
        asked = [method.local_epochs(client_round) for method in methods_of(self.lightning_module.trainer)]
        return next((epochs for epochs in asked if epochs is not None), self.local_epochs)

    def begin_clients(self, slot: BatchContext) -> None:
        """Download: one client's state goes into the module, several into a new cohort."""
        module = self.lightning_module
        assert module is not None
        if self._round_done:  # what a hook has changed in the module since the last round is the server's
            self.server.begin_round(module, self.reductions)
        self.between_rounds = self._round_done = False
        start_randomness(
            self.seed, *(client_round.client for client_round in slot.client_rounds), slot.client_rounds[0].round
        )
        methods = methods_of(module.trainer)
        received, kept = zip(
            *(self.server.download(client_round.client) for client_round in slot.client_rounds), strict=True
        )
        memories = [
            [self._moved(method.begin(own.get(section_of(method), {}), state, client_round)) for method in methods]
            for client_round, state, own in zip(slot.client_rounds, received, kept, strict=True)
        ]
        active = [[method.applies_to(client_round) for method in methods] for client_round in slot.client_rounds]
        self._memories = memories
        if isinstance(module, ReservoirTask):
            self.cohort = ReservoirCohort(module, received, slot.client_rounds)
            return
        if self.cohort_clients > 1:
            assert isinstance(module, Classifier)
            self.cohort = Cohort(module, received, self._base_optimizers[0], methods, memories, active)
            self.optimizers = [self.cohort.optimizer]
            return
        self.client_round = slot.client_rounds[0]
        load_entries(module, received[0])
        optimizer = self.optimizers[0]
        optimizer.state.clear()
        restore_optimizer(optimizer, kept[0].get("optimizer", {}))
        for method, memory, applies in zip(methods, memories[0], active[0], strict=True):
            method.start(memory, received[0], applies)

    def _moved(self, memory: Memory) -> Memory:
        """What was on disk, or in a checkpoint, comes back on the CPU."""
        if self.root_device.type == "cpu":
            return memory
        return {name: value.to(self.root_device) for name, value in memory.items()}

    def end_clients(self, slot: BatchContext) -> None:
        """Upload: check each client's state, add it to the aggregate, and keep what stays with the client."""
        module = self.lightning_module
        assert module is not None
        methods = methods_of(module.trainer)
        cohort, self.cohort = self.cohort, None
        self.optimizers = self._base_optimizers
        own = {name: value.detach() for name, value in entries(module).items()} if cohort is None else {}
        sent = own
        for method in methods if cohort is None else []:
            sent = method.send(method.memory, sent) if method.applies_to(slot.client_rounds[0]) else sent
        states = cohort.states() if cohort is not None else {name: value[None] for name, value in sent.items()}
        missed = [
            self.swarm is not None and self.swarm.misses(t.client, t.round, self.seed) for t in slot.client_rounds
        ]
        taken = self._upload(slot.client_rounds, states, missed)
        personal = self.server.personal or self.swarm is not None
        if not (methods or self.keep_optimizer or personal or self._listeners("on_client_end")):
            return  # nothing stays with the clients, and nobody looks at them
        for row, client_round in enumerate(slot.client_rounds):
            if not taken[row]:
                continue
            state = own if cohort is None else {name: value[row] for name, value in states.items()}
            memories = [method.memory for method in methods] if cohort is None else self._memories[row]
            kept: dict[str, Memory] = {}
            for method, memory in zip(methods, memories, strict=True):
                if not method.remembers(client_round):
                    continue
                name = section_of(method)
                generator = torch.Generator().manual_seed(
                    seed_of(self.seed, client_round.client, client_round.round, name)
                )
                data = slot.data[row].samples() if method.needs_samples else None
                kept[name] = method.finish(memory, state, data, client_round, generator)
            if self.keep_optimizer:
                kept["optimizer"] = optimizer_memory(self.optimizers[0])
            self.server.keep(client_round.client, state, kept, missed[row])
            self._tell("on_client_end", client_round, state if cohort is not None else None)

    def _upload(self, client_rounds: Sequence[ClientRound], states: State, missed: Sequence[bool]) -> list[bool]:
        """Send the states of those in reach; whether each client's state is one to go on with."""
        if not any(missed):
            return self.server.upload(client_rounds, states)
        self.server.record.missed += [
            client_round.client for client_round, out in zip(client_rounds, missed, strict=True) if out
        ]
        fine = [True] * len(client_rounds)
        rows = [row for row, out in enumerate(missed) if not out]
        if rows:
            sent = {name: value[rows] for name, value in states.items()}
            taken = self.server.upload([client_rounds[row] for row in rows], sent)
            for row, taken_row in zip(rows, taken, strict=True):
                fine[row] = taken_row
        return fine

    def end_round(self) -> None:
        """Aggregate, and put the server state into the module."""
        assert self.lightning_module is not None and self._batches is not None
        self.client_round = None
        load_entries(self.lightning_module, self.server.finish_round())
        solve = getattr(self.lightning_module, "on_after_aggregation", None)
        if solve is not None:
            solve()
        self._round_done = True
        self.server.record.skipped = self._batches.skipped
        if self.swarm is not None:
            self._elect(self.swarm)
        self._tell("on_round_end")

    def _elect(self, swarm: Swarm) -> None:
        """Name the round's master, over whose radio nothing went."""
        assert self.stream is not None
        record = self.server.record
        record.master = swarm.master([client for client in self.stream.plan.clients if client in record.upload_bytes])
        if self._master not in (None, *record.upload_bytes) and record.master is not None:
            log.warning("%s is out of reach as the swarm's master: %s takes over.", self._master, record.master)
        if record.master is not None:
            self._master = record.master
            record.upload_bytes[self._master] = record.download_bytes[self._master] = 0

    def _listeners(self, event: str) -> list[Callback]:
        assert self.lightning_module is not None
        callbacks: list[Callback] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        heard = [callback for callback in callbacks if hasattr(callback, event)]
        return sorted(heard, key=lambda callback: not isinstance(callback, Method))  # what they do is measured

    def settle(self) -> None:
        """Let no client's model stand in for the server's: after a round's last hook, or when it was cut short."""
        assert self.lightning_module is not None
        if not self._round_done and self.server.state:
            log.warning("A round was cut short: the server state stays as it was before it.")
            self.cohort = self.client_round = None
            self.optimizers = self._base_optimizers
            load_entries(self.lightning_module, self.server.state)
        self.between_rounds = self._round_done = True

    def _tell(self, event: str, client_round: ClientRound | None = None, state: State | None = None) -> None:
        """Call a federation's own event on the callbacks that have it, the client's state in the module."""
        module = self.lightning_module
        assert module is not None
        listeners = self._listeners(event)
        if listeners and state is not None:
            load_entries(module, state)
        for callback in listeners:
            getattr(callback, event)(module.trainer, module, *([client_round] if client_round is not None else []))


class _Rounds(Callback):
    """First of a federation's callbacks: begins and ends clients and rounds, and keeps their state in checkpoints."""

    def __init__(self, strategy: FederatedStrategy) -> None:
        self.strategy = strategy

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.strategy.begin_fit()

    def state_dict(self) -> dict[str, Any]:
        strategy = self.strategy
        place = {"belongs_to": strategy.belongs_to(), "between_rounds": strategy.between_rounds}
        return {**place, **strategy.server.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.strategy.server.load_state_dict(state_dict)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start_randomness(self.strategy.seed, "server", trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.strategy.next_slot()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.strategy.settle()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.strategy.settle()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.strategy.settle()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.strategy.end_slot()


def section_of(method: Method) -> str:
    """The name of a method's section in a client's state."""
    return type(method).__name__


def optimizer_memory(optimizer: Optimizer) -> Memory:
    """An optimizer's state as a flat dict of tensors: ``"<parameter number>.<name>"``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{name}": torch.as_tensor(value).detach().clone()
        for i, p in enumerate(parameters)
        for name, value in optimizer.state.get(p, {}).items()
    }


def restore_optimizer(optimizer: Optimizer, memory: Memory) -> None:
    """Give an optimizer the state that `optimizer_memory` took."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in memory.items():
        number, name = key.split(".", 1)
        optimizer.state[parameters[int(number)]][name] = value.clone()


if "federated" not in StrategyRegistry:
    StrategyRegistry.register("federated", FederatedStrategy, description="Rounds of many clients in one Trainer")
