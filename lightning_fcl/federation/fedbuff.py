"""FedBuff: asynchronous rounds. The server aggregates each time that its buffer of uploads is full."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.client_store import ClientState
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.server import ExtraTensors, FederatedServer
from lightning_fcl.federation.synchronization import (
    NANO,
    RoundTiming,
    Synchronization,
    TimingContext,
    count_sampled_clients,
    draw_client_order,
)
from lightning_fcl.federation.uploads import Uploads, difference
from lightning_fcl.validation import at_least, check_arguments

__all__ = ["FedBuff"]

_KEPT = "asynchronous"


@dataclass(frozen=True, order=True)
class Flight:
    """A client between the download of a round's state and the arrival of the upload. Times are in nanoseconds.

    Flights are ordered by arrival time. Flights with equal arrival times are ordered by the client's ``position``
    in the plan. ``version`` is the index of the round whose state the client downloaded.
    """

    arrival_ns: int
    position: int
    client: str
    version: int


@dataclass(frozen=True)
class Clock:
    """The simulated clock between two server steps: the time, and the clients between download and upload."""

    time_ns: int = 0
    flights: tuple[Flight, ...] = ()


@dataclass(frozen=True)
class _Known:
    """The cached timing of a round, with the unavailable clients and the clock after the round."""

    unavailable: frozenset[str]
    timed: RoundTiming
    clock: Clock


class FedBuff(Synchronization):
    """Buffered asynchronous rounds (Nguyen et al., 2022, "Federated Learning with Buffered Asynchronous Aggregation").

    `participation` sets the number of clients that train concurrently. When ``buffer_size`` uploads have arrived, the
    server aggregates the uploads, and the round ends. A client's update is the upload minus the state that the client
    downloaded. The server multiplies the update by ``(1 + staleness) ** -staleness_exponent``, where the staleness is
    the number of server steps since the download (Algorithm 1).

    When an upload arrives, another client starts. Clients start in the random order of the round's client sampling. The
    server's learning rate is set by ``server_optimizer``, such as ``SGD(lr=0.5)``. A client trains on the
    samples that it has in the round in which its upload arrives. Averaged entries that are not trained, such as
    buffers, are averaged without the staleness factor.

    Args:
        speeds: Speeds of the clients.
        buffer_size: Number of uploads per server step. A round has fewer uploads if no more clients are available.
        staleness_exponent: Exponent that reduces the weight of stale updates. With 0, staleness changes no weight.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``speeds`` is not a `ClientSpeeds`.

    Example:
        >>> FedBuff(ClientSpeeds(0.01, spread=0.5), buffer_size=10).staleness_weight(staleness=3)
        0.5
    """

    citations: ClassVar[tuple[str, ...]] = ("nguyen2022fedbuff",)

    time = "at any time"

    @check_arguments
    def __init__(self, speeds: ClientSpeeds, buffer_size: int, staleness_exponent: float = 0.5) -> None:
        super().__init__(speeds)
        at_least(1, buffer_size=buffer_size)
        at_least(0, staleness_exponent=staleness_exponent)
        self.buffer_size = buffer_size
        self.staleness_exponent = staleness_exponent
        # The first round whose timing can be computed. Earlier rounds have ended.
        self._first = 0
        self._start = Clock()
        self._known: dict[int, _Known] = {}

    def staleness_weight(self, staleness: int) -> float:
        """Return the factor by which the server multiplies an update with a given staleness, in server steps."""
        return float((1 + staleness) ** -self.staleness_exponent)

    def start(self, context: TimingContext, round_idx: int = 0) -> None:
        super().start(context, round_idx)
        clients = len(context.plan.clients)
        if self.buffer_size > clients:
            raise InvalidValueError(
                f"Expected `buffer_size` to be at most the stream's number of clients, {clients}, but got "
                f"{self.buffer_size}. "
                "Each client has at most one upload in the buffer.",
                hint=f"Use `buffer_size={clients}` or less.",
                argument="buffer_size",
                value=self.buffer_size,
            )
        self.check_reductions(context.reductions)
        if round_idx == 0:
            self._first, self._start, self._known = 0, Clock(), {}

    def round_timing(self, round_idx: int) -> RoundTiming:
        return self._at(round_idx).timed

    def clock_at(self, round_idx: int) -> Clock:
        return self._start if round_idx == self._first else self._at(round_idx - 1).clock

    def in_flight_versions(self, round_idx: int) -> list[int]:
        """Return the rounds whose states were downloaded by the clients in flight at the start of ``round_idx``.

        The result is sorted and contains each round once.
        """
        return sorted({flight.version for flight in self.clock_at(round_idx).flights})

    def state_dict(self, round_idx: int) -> dict[str, Any]:
        """Return the clock at the start of a round as numbers, strings and lists, for a checkpoint."""
        clock = self.clock_at(round_idx)
        flights = [[one.arrival_ns, one.position, one.client, one.version] for one in clock.flights]
        return {"round": round_idx, "now": clock.time_ns, "flights": flights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the clock at the start of a round from the result of `state_dict`."""
        clock = Clock(state["now"], tuple(Flight(*one) for one in state["flights"]))
        self._first, self._start, self._known = state["round"], clock, {}

    def start_round(self, round_idx: int) -> None:
        """Start a round. Afterwards, the clients of the round are fixed, and `clock_at` rejects earlier rounds."""
        self._start, self._first = self.clock_at(round_idx), round_idx
        self._known = {number: known for number, known in self._known.items() if number >= round_idx}

    def _at(self, round_idx: int) -> _Known:
        if round_idx < self._first:
            raise InvalidValueError(
                f"Expected `round_idx` to be at least {self._first}, but got {round_idx}, which has ended.",
                argument="round_idx",
                value=round_idx,
            )
        for number in range(self._first, round_idx + 1):
            unavailable_clients = frozenset(self.context.client_participation.unavailable(number))
            cached_round = self._known.get(number)
            if cached_round is None or (number > self._first and cached_round.unavailable != unavailable_clients):
                self._known = {earlier: of for earlier, of in self._known.items() if earlier < number}
                self._known[number] = _Known(
                    unavailable_clients, *self._advanced(number, self.clock_at(number), unavailable_clients)
                )
        return self._known[round_idx]

    def _advanced(
        self, round_idx: int, clock: Clock, unavailable_clients: Collection[str]
    ) -> tuple[RoundTiming, Clock]:
        """Advance the clock until the buffer is full. Return the timing of the round and the clock after the round."""
        plan, time_ns = self.context.plan, clock.time_ns
        present = self.context.client_participation.candidates(plan, round_idx).difference(unavailable_clients)
        flights, staleness, skipped = [*clock.flights], dict[str, int](), set[str]()
        may_start = present - {flight.client for flight in flights}
        # Reverse the order, because clients are taken from the end of the list.
        order = draw_client_order(plan, round_idx, self.context.client_participation.seed)[::-1].tolist()
        waiting_positions = [place for place in order if plan.clients[place] in may_start]
        while len(staleness) < self.buffer_size:
            # All uploads with the current arrival time arrive before other clients start.
            if not (flights and flights[0].arrival_ns <= time_ns):
                self._fill(flights, waiting_positions, round_idx, time_ns)
            if not flights:
                break
            flight = heapq.heappop(flights)
            time_ns = max(time_ns, flight.arrival_ns)
            if flight.client in present:
                staleness[flight.client] = round_idx - flight.version
            else:
                skipped.add(flight.client)
        if not staleness:
            raise InvalidValueError(
                f"Expected at least one available client with samples in round {round_idx}, but there is none.",
                hint="Lower `max_epochs`.",
                argument="max_epochs",
            )
        clients, skipped_clients = (
            [client for client in plan.clients if client in some] for some in (staleness, skipped)
        )
        stale = {client: staleness[client] for client in clients if staleness[client]}
        return RoundTiming(clients, skipped_clients, [], (time_ns - clock.time_ns) / NANO, stale), Clock(
            time_ns, tuple(flights)
        )

    def _fill(self, flights: list[Flight], waiting_positions: list[int], round_idx: int, time_ns: int) -> None:
        """Start waiting clients until the number of concurrent clients is reached."""
        clients = self.context.plan.clients
        room = count_sampled_clients(self.context.client_participation.fraction_or_count, len(clients)) - len(flights)
        for _ in range(min(room, len(waiting_positions))):
            position = waiting_positions.pop()
            client = clients[position]
            heapq.heappush(
                flights, Flight(time_ns + self.client_duration_ns(client, round_idx), position, client, round_idx)
            )

    def server(self, current_round: Callable[[], int]) -> Callable[..., FederatedServer]:
        return partial(BufferedServer, self, current_round)

    def check_reductions(self, reductions: Mapping[str, Reduction]) -> None:
        """Raise InvalidValueError if an entry that clients upload has a reduction other than a mean."""
        for name, reduction in reductions.items():
            if reduction.is_uploaded and not reduction.averages:
                raise InvalidValueError(
                    f"Expected the reduction `mean` for all entries that clients upload in asynchronous rounds, but "
                    f"`{name}` has `{reduction}`, which cannot combine uploads that started from different states.",
                    hint="Use `Deadline`, or a model or method without this entry.",
                    argument="mean",
                )

    def check(self, pipeline: Pipeline) -> None:
        if pipeline.mask is not None:
            raise InvalidValueError(
                f"Expected no `{type(pipeline.mask).__name__}` with `FedBuff`, because `FedBuff` scales the upload of "
                "each client, but got one.",
                hint="Remove the transform, or use `Deadline` as the `synchronization`.",
                argument="upload_transforms",
                value=type(pipeline.mask).__name__,
            )

    def fingerprint(self) -> dict[str, Any]:
        arguments = {"buffer_size": self.buffer_size, "staleness_exponent": self.staleness_exponent}
        return {"class": type(self).__name__, **arguments, "speeds": self.speeds.fingerprint()}


class BufferedServer(FederatedServer):
    """A server for `FedBuff`: clients train from the state that they downloaded, and can upload in a later round."""

    def __init__(self, synchronization: FedBuff, current_round: Callable[[], int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._schedule = synchronization
        self._round = current_round
        # The round after the last finished round.
        self._following = 0
        # The server's state at the start of a round, by the index of the round.
        # The rounds are the current round, and the rounds in which clients that still train have downloaded the state.
        self._versions: dict[int, State] = {}

    def start_round(
        self,
        module: nn.Module,
        rules: ReductionRules | None = None,
        extra_tensors: ExtraTensors | None = None,
        round_idx: int = 0,
    ) -> None:
        super().start_round(module, rules, extra_tensors, round_idx)
        # A module can declare other reductions in each round.
        self._schedule.check_reductions(self.reductions)
        round_idx = self._round()
        self._schedule.start_round(round_idx)
        earlier = {version: self._like_now(state) for version, state in self._versions.items() if version != round_idx}
        self._versions = {**earlier, round_idx: self.state}

    def _like_now(self, version: State) -> State:
        """Return an earlier state with the tensors on the device of the current state.

        The states of a checkpoint are on the CPU. Entries that clients download only once are taken from the current
        state.
        """
        changing = {name: value for name, value in self.state.items() if not self.reductions[name].once}
        for name, value in changing.items():
            if name not in version or version[name].shape != value.shape:
                raise InvalidValueError(
                    f"Expected the state that a client downloaded to contain `{name}` of shape {tuple(value.shape)}, "
                    "but this entry is missing or has another shape. The module has changed, or the checkpoint is "
                    "damaged.",
                    hint="Start without `ckpt_path`.",
                    argument=name,
                )
        return {**self.state, **{name: version[name].to(value.device) for name, value in changing.items()}}

    def download(self, clients: Sequence[str]) -> tuple[list[State], list[ClientState]]:
        states, client_states = super().download(clients)
        for row, client in enumerate(clients):
            if (version := self._version_of(client)) is not self.state:
                states[row] = {n: v if self.reductions[n].is_local else version[n] for n, v in states[row].items()}
        return states, client_states

    def _version_of(self, client: str) -> State:
        return self._versions[self._round() - self._staleness.get(client, 0)]

    @property
    def _staleness(self) -> Mapping[str, int]:
        return self._schedule.round_timing(self._round()).staleness

    def _origins(self, clients: Sequence[str]) -> State:
        if not any(client in self._staleness for client in clients):
            return super()._origins(clients)
        uploaded_reductions = {name: reduction for name, reduction in self.reductions.items() if reduction.is_uploaded}
        versions = [self._version_of(client) for client in clients]
        return {
            name: torch.stack([one.empty_upload(version[name]) for version in versions])
            for name, one in uploaded_reductions.items()
        }

    def adjust(self, uploads: Uploads) -> bool:
        clients = uploads.clients.client_ids
        if not any(client in self._staleness for client in clients):
            return False
        for name in uploads.values:
            if name in self._learnt or uploads.are_updates:
                pairs = zip(uploads.values[name], clients, strict=True)
                rows = [self._brought_up(name, value, client, uploads.are_updates) for value, client in pairs]
                uploads.values[name] = torch.stack(rows)
        return True

    def _brought_up(self, name: str, value: Tensor, client: str, is_update: bool) -> Tensor:
        """Return a client's upload of an entry as if the client had started with the current server state.

        A stale update of a trainable parameter is multiplied by the staleness weight. Other entries are not scaled.
        """
        age = self._staleness.get(client, 0)
        if not age:
            return value
        version, scale = self._version_of(client)[name], self._schedule.staleness_weight(age)
        if name not in self._learnt:
            return value + difference(version[None], self.state[name])[0]
        return scale * value if is_update else self.state[name] + scale * (value - version)

    def aggregate(self) -> State:
        state = super().aggregate()
        self._following = self._round() + 1
        self._versions = {
            version: self._versions[version] for version in self._schedule.in_flight_versions(self._following)
        }
        return state

    def state_dict(self, clients: Mapping[str, ClientState] | None = None) -> dict[str, Any]:
        clock = self._schedule.state_dict(self._following)
        return {**super().state_dict(clients), _KEPT: {**clock, "versions": self._versions}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        buffer_state = state.get(_KEPT)
        if not isinstance(buffer_state, Mapping) or not _is_whole(buffer_state):
            raise InvalidValueError(
                f"Expected `{_KEPT}` of the checkpoint to contain the clients in flight and the states that they "
                f"downloaded, but got {buffer_state!r:.200}.",
                hint="Resume from another checkpoint.",
                argument=_KEPT,
                value=buffer_state,
            )
        self._schedule.load_state_dict(buffer_state)
        self._following, self._versions = buffer_state["round"], dict(buffer_state["versions"])


def _is_whole(buffer_state: Mapping[str, Any]) -> bool:
    """Return whether a clock from a checkpoint is valid and contains the states of the clients in flight."""
    versions, flights = buffer_state.get("versions"), buffer_state.get("flights")
    if not (isinstance(versions, Mapping) and isinstance(flights, list)):
        return False
    kinds = (int, int, str, int)
    return (
        all(isinstance(buffer_state.get(name), int) for name in ("round", "now"))
        and all(isinstance(one, list) and tuple(map(type, one)) == kinds and one[3] in versions for one in flights)
        and all(isinstance(of, Mapping) and all(isinstance(v, Tensor) for v in of.values()) for of in versions.values())
    )
