"""The server of a federation, and its state between rounds."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import (
    Aggregator,
    ClientWeights,
    Reduction,
    ReductionRules,
    State,
    apply_sums,
    compute_client_weights,
    frozen_parameters,
    get_reduction,
    get_reductions,
    state_tensors,
)
from lightning_fcl.federation.client_store import RESIDUAL_SECTION, ClientState, ClientStore, StateSection
from lightning_fcl.federation.compression import DIVERGENCE_HINT
from lightning_fcl.federation.exact_sum import GroupSums
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.robust import check_finite, check_stays_finite, check_update_norm, find_non_finite
from lightning_fcl.federation.sent_once import SentOnce
from lightning_fcl.federation.server_optimizer import OptimizerFactory, ServerOptimizer, get_settings, make_optimizer
from lightning_fcl.federation.uploads import Exchange, Messages, Setting, Uploads, UploadTransform, difference
from lightning_fcl.validation import check_clients, format_code_names, format_names

log = logging.getLogger(__name__)

ExtraTensors = Mapping[str, tuple[Tensor, Reduction | str]]
"""Entries that the server's state contains in addition to the module's entries, such as ``"FedProto.prototypes"``.

Each name maps to the initial value and the reduction.
"""


class FederatedServer:
    """The server of a federation: its state between rounds, and the download and the upload of each round.

    Args:
        client_store: Store of the clients' states.
        client_weights: Weight of each client in means. ``"samples"``: its number of samples in the round.
            ``"trained_samples"``: also counts replay samples. ``"uniform"``: 1. A dict: a weight for each client.
        server_optimizer: Function that makes the optimizer that updates the server state with the pseudo-gradient.
        transforms: The upload transforms, in the order of `lightning_fcl.federation.uploads.Stage`.

    Example:
        >>> import torch
        >>> federation = FederatedServer(ClientStore())
        >>> federation.start_fit(nn.Linear(1, 1, bias=False))
        >>> federation.upload([ClientRound("a", round_idx=0, num_samples=2)], {"weight": torch.tensor([[[3.0]]])})
        [True]
        >>> federation.aggregate()["weight"]
        tensor([[3.]])
    """

    def __init__(
        self,
        client_store: ClientStore,
        client_weights: ClientWeights = "samples",
        server_optimizer: OptimizerFactory | None = None,
        transforms: Sequence[UploadTransform] = (),
    ) -> None:
        if isinstance(client_weights, str) and client_weights not in ("samples", "trained_samples", "uniform"):
            raise InvalidValueError(
                'Expected `client_weights` to be "samples", "trained_samples", "uniform" or a dict of weights, but got '
                f'"{client_weights}".',
                argument="client_weights",
            )
        self.client_store = client_store
        if not isinstance(client_weights, str):
            client_weights = {str(client): weight for client, weight in client_weights.items()}
        self.client_weights: ClientWeights = client_weights
        self.pipeline = Pipeline(transforms)
        # Seed of the federation.
        self.seed = 0
        # Names of the state sections of the methods whose clients send messages.
        self.senders: Sequence[str] = ()
        # Messages that arrived in the round, by section and client.
        self.messages: dict[str, dict[str, State]] = {}
        # Maximum change of the state per round, relative to the larger of 1 and the norm of the state.
        self.max_update_norm = math.inf
        self.state: State = {}
        # Index of each client. It defines an order of clients that does not depend on the arrival of uploads.
        self.client_index: dict[str, int] = {}
        # Entries that are not in the module. The server keeps their values between rounds.
        self.extra_tensors: State = {}
        self.sent_once = SentOnce()
        self.reductions: dict[str, Reduction] = {}
        self._factory = server_optimizer
        self._server_optimizer: ServerOptimizer | None = None
        self._restored: dict[str, Any] = {}
        # Trainable parameters that clients upload in this round.
        self._learnt: list[str] = []
        # Frozen parameters, which clients upload only if training changes them.
        self._frozen: list[str] = []
        # Frozen parameters that are unchanged since all devices received them.
        self._published: State | None = None
        # If a fit is resumed, the names of the entries of `_published` when the checkpoint was saved. Otherwise None.
        self._untouched: list[str] | None = None
        # Latest round in which the upload of each client was accepted.
        self.accepted: dict[str, int] = {}
        self.record, self.aggregator = RoundRecord(), Aggregator({})
        # Frozen parameters that a client changed in this round.
        self._changed: set[str] = set()
        # New client states of transforms, by client, until they are saved.
        self._memories: dict[str, ClientState] = {}
        # Tensors that clients keep until the round ends, from the messages of transforms.
        self._exchanged: dict[str, StateSection] = {}

    def start_fit(
        self,
        module: nn.Module,
        rules: ReductionRules | None = None,
        extra_tensors: ExtraTensors | None = None,
        round_idx: int = 0,
    ) -> None:
        """Start a fit with a module's state as the server's state. See `start_round`."""
        # The optimizer of an earlier fit exists if this fit continues the earlier fit.
        if self._server_optimizer is not None:
            self._restored, self._server_optimizer = self._server_optimizer.state_dict(), None
        self._published = None
        self.start_round(module, rules, extra_tensors, round_idx)

    def start_round(
        self,
        module: nn.Module,
        rules: ReductionRules | None = None,
        extra_tensors: ExtraTensors | None = None,
        round_idx: int = 0,
    ) -> None:
        """Start a round with a module's state as the server's state. Delete the previous round's uploads and record.

        Args:
            module: The module. If it has a ``reductions`` attribute, the attribute defines the reductions of the
                module's entries. The attribute is read again in each round.
            rules: Reductions by pattern, which override the reductions of the module.
            extra_tensors: Entries in addition to the module's entries. The reduction of an entry defines whether
                clients download and upload the entry. The server keeps the values between rounds, in the attribute
                ``extra_tensors``. A given value is used only if the server has no value yet.
            round_idx: Index of the round.

        Raises:
            InvalidValueError: If the module and ``extra_tensors`` have an entry with the same name, or a trainable
                entry that clients upload is non-finite.
        """
        self.reductions = get_reductions(module, rules)
        self.state = {name: plain_tensor(value).clone() for name, value in state_tensors(module).items()}
        extra_tensors = {**(extra_tensors or {}), **self.pipeline.server_entries}
        for name, (value, reduction) in extra_tensors.items():
            if name in self.state:
                raise InvalidValueError(
                    "Expected different names in the server state of methods and in the module, but both contain "
                    f"`{name}`. Rename the entry of the module.",
                    argument=name,
                )
            self.reductions[name] = get_reduction(name, reduction)
            self.state[name] = self.extra_tensors[name] = plain_tensor(self.extra_tensors.get(name, value)).to(
                value.device, copy=True
            )
        self.sent_once.begin_round(extra_tensors, self.state, self.reductions)
        self._learnt = [n for n, p in module.named_parameters() if p.requires_grad and self.reductions[n].is_uploaded]
        self._find_frozen(module)
        check_finite(self.state, self._learnt, "before a round. Start with a module that has only finite numbers")
        if self._factory is not None and self._server_optimizer is None and self._learnt:
            self._server_optimizer = ServerOptimizer(self._factory, self._learnt)
            self._server_optimizer.load_state_dict(self._restored)
        self.client_store.start_round()
        setting = Setting(
            self.state,
            self.reductions,
            self._learnt,
            self.seed,
            round_idx,
            list(self.client_index),
            self.senders,
            self._frozen,
        )
        self.pipeline.setup(setting)
        self.record, self.aggregator = RoundRecord(), Aggregator(self.reductions, self.pipeline)
        self._changed, self._memories, self._exchanged, self.messages = set(), {}, {}, {}
        self._offer(self.state)

    def _find_frozen(self, module: nn.Module) -> None:
        """Find the frozen parameters that a round may aggregate, and frozen parameters that devices already have."""
        self._frozen = frozen_parameters(module, self.reductions)
        if self._published is None:
            untouched_names, self._untouched = self._frozen if self._untouched is None else self._untouched, None
            self._published = {name: self.state[name] for name in self._frozen if name in untouched_names}
        self._published = {
            name: value
            for name, value in self._published.items()
            if name in self._frozen and torch.equal(value, self.state[name])
        }
        # Store one tensor instead of two equal ones.
        self.state.update(self._published)

    def _offer(self, state: State) -> None:
        """Set the server's state. Later calls of `download` return this state."""
        self.state = state
        self._start = {name: self.reductions[name].initial_value(value) for name, value in state.items()}
        download_state = {name: value for name, value in state.items() if self.reductions[name].is_downloaded}
        published_names = self._published or ()
        transmitted_state = self.sent_once.offer(
            {n: v for n, v in download_state.items() if n not in published_names}, self.reductions
        )
        self._download_bytes = sum(
            self.reductions[name].upload_nbytes(value) for name, value in transmitted_state.items()
        )
        self._all_travel = len(download_state) == len(state) and all(
            self._start[name] is download_state[name] for name in download_state
        )

    @property
    def optimizer_settings(self) -> dict[str, Any] | None:
        """Settings of the optimizer that updates the server state, or None if there is no such optimizer."""
        if self._factory is None:
            return None
        return get_settings(make_optimizer(self._factory, [nn.Parameter(torch.zeros(1))], "server_optimizer"))

    @property
    def has_local_state(self) -> bool:
        """Whether clients keep local entries or the states of transforms between rounds."""
        return any(reduction.is_local for reduction in self.reductions.values()) or self.pipeline.keeps_state

    def download(self, clients: Sequence[str]) -> tuple[list[State], list[ClientState]]:
        """Return the state that each client starts a round from, and the stored state of each client.

        A client starts from the server's state, with its client-local entries, and with the entries that it could not
        upload because it missed a synchronization. Clients without such entries can share one state object.
        """
        client_states = [self.client_store[client] for client in clients]
        states = [
            self.state if self._all_travel and not own.get(RESIDUAL_SECTION) else self._started(own)
            for own in client_states
        ]
        missing = self.sent_once.missing_bytes if self.sent_once.sizes else lambda client: 0
        for client, client_state in zip(clients, client_states, strict=True):
            if not client_state.get(RESIDUAL_SECTION):
                self.record.add_download_bytes(client, self._download_bytes + missing(client))
        return states, client_states

    def _started(self, client_state: ClientState) -> State:
        """Return the start state of a client that has client-local entries, or entries that it could not upload."""
        local_entries = {
            n: v for n, v in client_state.get("model", {}).items() if n in self._start and self.reductions[n].is_local
        }
        client_entries = {**client_state.get(RESIDUAL_SECTION, {}), **local_entries}
        # Entries from a store on disk or from a checkpoint are on the CPU.
        return {n: client_entries[n].to(v.device) if n in client_entries else v for n, v in self._start.items()}

    def upload(
        self,
        client_rounds: Sequence[ClientRound],
        states: Mapping[str, Tensor],
        messages: Messages | None = None,
    ) -> list[bool]:
        """Encode the uploads of clients, count the bytes, and accept the uploads. Only for simulations.

        Args:
            client_rounds: The clients in the current round.
            states: States of the clients, each entry of shape (clients, ...).
            messages: Messages of each client to methods, by section of the method.

        Returns:
            A flag for each client (True: the upload was accepted). Uploads with non-finite numbers are dropped.
        """
        parts = client_rounds if isinstance(client_rounds, ClientRounds) else ClientRounds.from_rounds(client_rounds)
        uploads, usable_flags, sums, non_finite_entries = self.encode(parts, states, messages)
        if not len(uploads):
            return usable_flags
        for client, nbytes in zip(uploads.clients.client_ids, uploads.nbytes(), strict=True):
            self.record.add_upload_bytes(client, nbytes)
        self.decode(uploads)
        accepted = iter(
            self.accept(uploads) if self.pipeline.transforms else self.accept(uploads, sums, non_finite_entries)
        )
        return [fine and next(accepted) for fine in usable_flags]

    def encode(
        self, parts: ClientRounds, states: Mapping[str, Tensor], messages: Messages | None = None
    ) -> tuple[Uploads, list[bool], GroupSums, list[str]]:
        """Do the client side of an upload: drop clients with non-finite numbers, and apply the transforms.

        Returns:
            Four values: the uploads of the clients with finite numbers, a flag for each client (True: all numbers are
            finite), weighted sums of entries over the uploads, and the names of the uploaded entries in which the
            server's state has non-finite numbers. The sums can be empty.
        """
        # The client side of transforms changes their own entries, which training does not return.
        for name in self.pipeline.server_entries:
            empty_upload = self.reductions[name].empty_upload(self.state[name])
            states = {name: empty_upload.expand(len(parts), *empty_upload.shape), **states}
        missing = [name for name, reduction in self.reductions.items() if reduction.is_uploaded and name not in states]
        if missing:
            raise InvalidValueError(
                f"Expected client states to contain all entries that clients upload, but got states without "
                f"{format_code_names(missing)}.",
                argument=missing[0],
            )
        weights = compute_client_weights(self.client_weights, parts)
        # With transforms, the server does not add these states, so their sums are not used.
        plain = not self.pipeline.transforms
        sums = self.aggregator.weighted_sums(states, weights) if len(parts) > 1 and plain else {}
        usable_flags, non_finite_entries = self.drop_non_finite(parts, states, sums)
        rows = [row for row, fine in enumerate(usable_flags) if fine]
        upload_values = {name: states[name] for name, reduction in self.reductions.items() if reduction.is_uploaded}
        if len(rows) < len(usable_flags):
            parts, weights = ClientRounds.from_rounds([parts[row] for row in rows]), [weights[row] for row in rows]
            upload_values = {name: value[rows] for name, value in upload_values.items()}
            sums = self.aggregator.weighted_sums(upload_values, weights) if len(rows) > 1 and plain else {}
        client_states = [self.client_store[client] for client in parts.client_ids] if self.pipeline.keeps_state else ()
        origins = {} if plain else self._origins(parts.client_ids)
        uploads = Uploads(parts, weights, self.reductions, upload_values, origins, client_states=client_states)
        for section, client_messages in (messages or {}).items():
            uploads.messages[section] = [client_messages[row] for row in rows]
        if self.pipeline.exchanges:
            uploads.exchanged = [self._exchanged.setdefault(client, {}) for client in parts.client_ids]
        self._leave_out(uploads)
        if self.pipeline.needs_updates:
            uploads.values = {name: difference(value, uploads.origins[name]) for name, value in upload_values.items()}
            uploads.are_updates = True
        if rows:
            self.pipeline.encode(uploads)
        for section, memories in uploads.memories.items():
            for client, memory in zip(parts.client_ids, memories, strict=True):
                self._memories.setdefault(client, {})[section] = memory
        return uploads, usable_flags, sums, non_finite_entries

    def received(self, clients: ClientRounds, tensors: Mapping[str, Tensor]) -> Uploads:
        """Return the upload of one client from the tensors that its node sent. See `Pipeline.received`."""
        (weight,) = compute_client_weights(self.client_weights, clients)
        return self.pipeline.received(clients, weight, tensors, self._frozen)

    def decode(self, uploads: Uploads) -> None:
        """Decode uploads. With a transform that has ``sums_only``, do nothing."""
        if self.pipeline.mask is None:
            self.pipeline.decode(uploads)

    def accept(
        self, uploads: Uploads, sums: GroupSums | None = None, non_finite_entries: Sequence[str] | None = None
    ) -> list[bool]:
        """Add decoded uploads to the aggregate on the server. Drop uploads with non-finite numbers.

        Args:
            uploads: The decoded uploads.
            sums: Weighted sums of entries, if they are known.
            non_finite_entries: Names of the entries in which the server has non-finite numbers. If given, all other
                numbers of the uploads must be finite. None: check the uploads.

        Returns:
            A flag for each client (True: the upload was accepted).
        """
        accepted_flags, masked = [True] * len(uploads), self.pipeline.mask is not None
        if non_finite_entries is None:
            accepted_flags, non_finite_entries = self._check_decoded(uploads) if not masked else (accepted_flags, [])
        rows = [row for row, fine in enumerate(accepted_flags) if fine]
        if not masked and self.adjust(uploads):
            sums = None
        values = uploads.tensors() if masked else uploads.values
        clients, weights = uploads.clients.client_ids, uploads.weights
        if self.aggregator.sums is not None and not masked:
            values = {n: v if n in self.aggregator.sums.names else uploads.state(n) for n, v in values.items()}
        if len(rows) < len(uploads):
            values = {name: value[rows] for name, value in values.items()}
            clients, weights = [clients[row] for row in rows], [weights[row] for row in rows]
        if not self.pipeline.needs_updates:
            values = self.aggregator.zero_non_finite(values, non_finite_entries)
            if sums is None or non_finite_entries or len(rows) < len(uploads):
                sums = self.aggregator.weighted_sums(values, weights) if len(rows) > 1 else {}
        if rows:
            numbers = [self.client_index.setdefault(client, len(self.client_index)) for client in clients]
            self.aggregator.accumulate(values, weights, numbers, sums)
            for name in self._frozen:
                if any(name not in uploads.unchanged[row] for row in rows):
                    self._changed.add(name)
            self.record.accepted += clients
            for section, client_messages in uploads.messages.items():
                arrived = self.messages.setdefault(section, {})
                arrived |= {client: client_messages[row] for client, row in zip(clients, rows, strict=True)}
        return accepted_flags

    def send(self, client: str, tensors: State) -> State:
        """Count the bytes of tensors that are sent to a client in addition to the state, and return the tensors."""
        self.record.add_download_bytes(client, sum(value.nbytes for value in tensors.values()))
        return tensors

    def exchange(
        self, clients: Sequence[str], ranks: Ranks, hosts: Callable[[str], bool], is_after_upload: bool = False
    ) -> None:
        """Let transforms exchange messages with clients, before or after the uploads.

        Args:
            clients: The clients.
            ranks: The ranks. Each of them simulates some of the clients.
            hosts: Function that returns whether this rank simulates a client.
            is_after_upload: Whether the uploads have arrived.
        """

        def answers(transform: UploadTransform, questions: Mapping[str, State]) -> Mapping[str, State]:
            local_answers = {}
            for client in filter(hosts, questions):
                question = self.send(client, questions[client])
                local_answers[client] = transform.answer(client, question, self._exchanged.setdefault(client, {}))
                self.record.add_upload_bytes(client, sum(value.nbytes for value in local_answers[client].values()))
            answer_by_client = {
                client: answer for part in ranks.all_gather_object(local_answers) for client, answer in part.items()
            }
            return {client: answer_by_client[client] for client in questions}

        for transform in self.pipeline.exchanges:
            messages = Exchange(clients, partial(answers, transform))
            (transform.after_upload if is_after_upload else transform.before_upload)(messages)

    def adjust(self, uploads: Uploads) -> bool:
        """Correct uploads of clients that started from an older server state. Return whether an upload changed.

        Synchronous rounds have no such uploads. Therefore this class corrects nothing.
        """
        return False

    def _origins(self, clients: Sequence[str]) -> State:
        """Return, for each uploaded entry, the value that is subtracted from a client's value to get the update."""
        return {name: of.empty_upload(self.state[name]) for name, of in self.reductions.items() if of.is_uploaded}

    def _check_decoded(self, uploads: Uploads) -> tuple[list[bool], list[str]]:
        """Drop clients with non-finite decoded uploads. Return values as `drop_non_finite` does."""
        if not uploads.are_updates:
            return self.drop_non_finite(uploads.clients, uploads.values, {})
        faults: dict[int, list[str]] = {}
        for name, value in uploads.values.items():
            finite = torch.isfinite(value).view(*value.shape, 1).flatten(1).all(dim=1).tolist()
            for row in itertools.compress(range(len(uploads)), (not fine for fine in finite)):
                faults.setdefault(row, []).append(name)
        for row, names in faults.items():
            self._drop(uploads.clients[row], names)
        return [row not in faults for row in range(len(uploads))], []

    def drop_non_finite(
        self, client_rounds: ClientRounds, states: Mapping[str, Tensor], sums: GroupSums
    ) -> tuple[list[bool], list[str]]:
        """Drop the uploads of clients with non-finite numbers.

        Returns:
            A flag for each client (True: all numbers are finite), and the names of the uploaded entries in which the
            server has non-finite numbers.
        """
        faults, non_finite_entries = find_non_finite(states, self._start, self.reductions, sums)
        for row, at_fault in faults.items():
            self._drop(client_rounds[row], at_fault)
        return [row not in faults for row in range(len(client_rounds))], non_finite_entries

    def _leave_out(self, uploads: Uploads) -> None:
        """Mark the frozen parameters that clients have not changed. The clients do not upload these parameters."""
        for name in self._frozen:
            value = uploads.values[name]
            unchanged_flags = (value == self.state[name]).view(*value.shape, 1).flatten(1).all(dim=1).tolist()
            for unchanged in itertools.compress(uploads.unchanged, unchanged_flags):
                unchanged.add(name)

    def _drop(self, client_round: ClientRound, at_fault: Sequence[str]) -> None:
        """Drop an upload, and delete the entries that the client could not upload earlier.

        These entries would make later uploads non-finite.
        """
        client, client_state = client_round.client_id, self.client_store[client_round.client_id]
        if RESIDUAL_SECTION in client_state:
            self.client_store[client] = {
                section: memory for section, memory in client_state.items() if section != RESIDUAL_SECTION
            }
        names = format_names(at_fault, max_names=3)
        self.record.dropped[client] = f"non-finite: {names}"
        message = "Round %d: dropped the upload of client %s (non-finite: %s). %s"
        log.warning(message, client_round.round_idx, client, names, DIVERGENCE_HINT)

    def save_client_state(
        self,
        client: str,
        state: Mapping[str, Tensor],
        method_states: Mapping[str, StateSection],
        missed_sync: bool = False,
    ) -> None:
        """Save the client-local entries of ``state``, and the ``method_states`` by section.

        If the client missed the synchronization (``missed_sync``), also save the entries that it could not upload. The
        client continues from these entries.
        """
        local_entries = {n: v.detach().clone() for n, v in state.items() if self.reductions[n].is_local}
        unsent = {n: v.detach().clone() for n, v in state.items() if missed_sync and self.reductions[n].is_uploaded}
        sections = {"model": local_entries, RESIDUAL_SECTION: unsent, **self._memories.pop(client, {}), **method_states}
        client_state: ClientState = {section: memory for section, memory in sections.items() if memory}
        if client_state or self.client_store[client]:
            self.client_store[client] = client_state

    def sync(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Merge the uploads, messages and records of all ranks.

        Args:
            ranks: The ranks.
            order: Position of each client in the round's order.
        """
        self.aggregator.sync(ranks)
        self.record.sync(ranks, order)
        self._changed = set().union(*ranks.all_gather_object(self._changed))
        if self.senders:
            for section in self.senders:
                client_messages = [
                    item for part in ranks.all_gather_object(self.messages.get(section, {})) for item in part.items()
                ]
                self.messages[section] = dict(sorted(client_messages, key=lambda item: order.get(item[0], -1)))

    def aggregate(self) -> State:
        """Aggregate the uploads and return the new server state.

        Raises:
            InvalidValueError: If an entry becomes non-finite, or the change of the state exceeds ``max_update_norm``.
        """
        # Frozen parameters that no client changed stay bitwise identical.
        frozen = {name: self.state[name] for name in self._frozen if name not in self._changed}
        aggregate = self.aggregator.compute(self.state)
        if self.aggregator.sums is not None and (self.aggregator.num_uploads or self.pipeline.changes_sums):
            sums = self.aggregator.sums.compute(self.state, [*self.record.accepted], self.pipeline.setting.round_idx)
            self.pipeline.on_sum(sums)
            aggregate |= apply_sums(self.state, sums)
            check_stays_finite(self.state, aggregate)
        aggregate |= frozen
        self.pipeline.on_aggregate(self.state, aggregate)
        if not (self.aggregator.num_uploads or self.pipeline.changes_sums):
            log.warning("No upload of this round was usable: the server state did not change.")
        elif self._server_optimizer is not None and self._learnt:
            aggregate = self._server_optimizer.step(self.state, aggregate)
            situation = "after a step of the server's optimizer. Lower the learning rate of `server_optimizer`"
            check_finite(aggregate, self._learnt, situation)
        if self.max_update_norm < math.inf:
            rules = {n: of for n, of in self.reductions.items() if of.is_uploaded and of.is_downloaded}
            moving = [name for name in rules if self.state[name].is_floating_point()]
            check_update_norm(self.state, aggregate, moving, self.max_update_norm)
        self.extra_tensors.update({name: aggregate[name] for name in self.extra_tensors if name in aggregate})
        # Release the memory of this round's aggregator. The aggregator of the next round can need as much memory.
        self.aggregator = Aggregator({})
        self._offer(aggregate)
        self.sent_once.note(self.record)
        self.pipeline.end_round()
        self.client_store.commit_round()
        return aggregate

    def undo_round(self) -> None:
        """Restore the states of clients and transforms from before the interrupted round."""
        self._memories = {}
        self.pipeline.undo_round()
        self.client_store.roll_back_round()

    def get_section(self, section: str) -> State:
        """Return the tensors that the server keeps for a method, by name."""
        return {
            n.removeprefix(f"{section}."): value
            for n, value in self.extra_tensors.items()
            if n.startswith(f"{section}.")
        }

    def check_clients(self, stream_clients: Sequence[str], explicit_clients: Iterable[str] = ()) -> None:
        """Raise an error if ``client_weights`` or other settings do not match the clients of the stream.

        Each client that a setting names must be in the stream. If ``client_weights`` is a dict, it must contain a
        positive weight for each client of the stream.
        """
        weights = self.client_weights if isinstance(self.client_weights, dict) else None
        setting = "client names in the settings of the strategy and the methods"
        check_clients(setting, {*explicit_clients, *(weights or ())}, stream_clients, argument="names")
        if unweighted_clients := [
            client for client in stream_clients if weights is not None and not weights.get(client, 0) > 0
        ]:
            raise InvalidValueError(
                "Expected `client_weights` to contain a positive weight for each client, but the weight is missing or "
                f"not positive for {format_names(unweighted_clients)}.",
                hint='Add a number above 0 for each of these clients, or use `client_weights="samples"`.',
                argument="client_weights",
            )

    def state_dict(self, clients: Mapping[str, ClientState] | None = None) -> dict[str, Any]:
        """Return the values that a checkpoint stores in addition to the module's state.

        Args:
            clients: States of all clients. Required if the store does not contain all of them.
        """
        optimizer = self._server_optimizer.state_dict() if self._server_optimizer is not None else self._restored
        clients = {client: self.client_store[client] for client in self.client_store} if clients is None else clients
        untouched = [name for name in self._published or () if name not in self._changed]
        progress_state = {"extra": self.extra_tensors, "sent_once": self.sent_once.received, "accepted": self.accepted}
        progress_state["transforms"] = [transform.state_dict() for transform in self.pipeline.transforms]
        return {"clients": clients, "server_optimizer": optimizer, "untouched": untouched, **progress_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. Call this before `start_fit`."""
        self.client_store.replace_all(state["clients"])
        self.extra_tensors = dict(state.get("extra", {}))
        self.accepted = {str(client): int(round_idx) for client, round_idx in state.get("accepted", {}).items()}
        self.sent_once.received = dict(state.get("sent_once", {}))
        self._restored = state["server_optimizer"]
        for transform, transform_state in zip(self.pipeline.transforms, state.get("transforms", ()), strict=False):
            transform.load_state_dict(transform_state)
        self._untouched = untouched_names if isinstance(untouched_names := state.get("untouched"), list) else None
        self._server_optimizer = None
