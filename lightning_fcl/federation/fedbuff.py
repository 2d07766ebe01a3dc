"""FedBuff: asynchronous rounds, in which the server steps whenever its buffer of uploads is full."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """A client from its download, of a round's state, to its arrival, in nanoseconds; of equals the first by place."""

    arrival_ns: int
    position: int
    client: str
    version: int


@dataclass(frozen=True)
class Clock:
    """The state of a deployment between two steps of the server."""

    time_ns: int = 0
    flights: tuple[Flight, ...] = ()


@dataclass(frozen=True)
class _Known:
    """A round that was looked at: who was unavailable then, what the clock says of it, and the clock after it."""

    unavailable: frozenset[str]
    timed: RoundTiming
    clock: Clock


class FedBuff(Synchronization):
    """Buffered asynchronous rounds (Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation").

    As many clients as `participation` says train at any time. When ``buffer_size`` uploads have come, the server steps,
    which ends a round. What an upload adds is its difference from the state that its client had downloaded, times
    ``(1 + staleness) ** -staleness_exponent``, where the staleness is the number of the server's steps in between
    (Algorithm 1). Whoever has arrived makes room for another, which the lots of the round prefer. The server's learning
    rate is that of a ``server_optimizer``, such as ``SGD(lr=0.5)``. A client trains on its samples of the round in
    which its upload arrives. Entries that are averaged but not learnt are averaged as they are.

    Args:
        speeds: How fast clients are.
        buffer_size: Number of uploads with which the server steps; fewer, where no other client has data.
        staleness_exponent: How much less stale uploads count; 0: as much as fresh ones.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``speeds`` are something else.

    Example:
        >>> FedBuff(ClientSpeeds(0.01, spread=0.5), buffer_size=10).staleness_weight(staleness=3)
        0.5
    """

    time = "at any time"

    @check_arguments
    def __init__(self, speeds: ClientSpeeds, buffer_size: int, staleness_exponent: float = 0.5) -> None:
        super().__init__(speeds)
        at_least(1, buffer_size=buffer_size)
        at_least(0, staleness_exponent=staleness_exponent)
        self.buffer_size = buffer_size
        self.staleness_exponent = staleness_exponent
        self._first = 0  # of the rounds that this fit knows
        self._start = Clock()
        self._known: dict[int, _Known] = {}

    def staleness_weight(self, staleness: int) -> float:
        """The factor of what an upload adds that is so many steps behind."""
        return float((1 + staleness) ** -self.staleness_exponent)

    def start(self, context: TimingContext, round_idx: int = 0) -> None:
        super().start(context, round_idx)
        clients = len(context.plan.clients)
        if self.buffer_size > clients:
            raise InvalidValueError(
                f"Expected `buffer_size` to be at most the stream's {clients} clients but got {self.buffer_size}: a "
                "client has one upload in it at a time.",
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
        """The rounds from whose states somebody is under way when a round begins, ascending."""
        return sorted({flight.version for flight in self.clock_at(round_idx).flights})

    def state_dict(self, round_idx: int) -> dict[str, Any]:
        """The clock at the beginning of a round, as plain values."""
        clock = self.clock_at(round_idx)
        flights = [[one.arrival_ns, one.position, one.client, one.version] for one in clock.flights]
        return {"round": round_idx, "now": clock.time_ns, "flights": flights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the clock at the beginning of a round."""
        clock = Clock(state["now"], tuple(Flight(*one) for one in state["flights"]))
        self._first, self._start, self._known = state["round"], clock, {}

    def start_round(self, round_idx: int) -> None:
        """A round begins: who takes part in it stays as it is, and nobody asks for earlier ones any more."""
        self._start, self._first = self.clock_at(round_idx), round_idx
        self._known = {number: known for number, known in self._known.items() if number >= round_idx}

    def _at(self, round_idx: int) -> _Known:
        if round_idx < self._first:
            raise InvalidValueError(
                f"Expected a round from {self._first} on but got {round_idx}, which has passed.",
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
        """Let time pass until the buffer is full: a round, and the clock after it."""
        plan, time_ns = self.context.plan, clock.time_ns
        present = self.context.client_participation.candidates(plan, round_idx).difference(unavailable_clients)
        flights, staleness, skipped = [*clock.flights], dict[str, int](), set[str]()
        may_start = present - {flight.client for flight in flights}
        order = draw_client_order(plan, round_idx, self.context.client_participation.seed)[
            ::-1
        ].tolist()  # the first to start comes last
        waiting_positions = [place for place in order if plan.clients[place] in may_start]
        while len(staleness) < self.buffer_size:
            if not (flights and flights[0].arrival_ns <= time_ns):  # all that arrive now have arrived
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
                f"Expected at least one client with data in round {round_idx} but none has any.",
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
        """Let clients download as long as there is room."""
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
        """Refuse reductions of what clients send that are no means."""
        for name, reduction in reductions.items():
            if reduction.is_uploaded and not reduction.averages:
                raise InvalidValueError(
                    f"Expected `mean` as the reduction of all that clients send in asynchronous rounds but `{name}` "
                    f"has `{reduction}`: what it makes of uploads to different states of the server is not defined.",
                    hint="Use a `Deadline`, or a model or method without it.",
                    argument="mean",
                )

    def check(self, pipeline: Pipeline) -> None:
        if pipeline.mask is not None:
            raise InvalidValueError(
                f"Expected no `{type(pipeline.mask).__name__}` beside `FedBuff`, which scales the uploads of single "
                "clients, but got one.",
                hint="Leave it out, or use a `Deadline` as the `synchronization`.",
                argument="upload_transforms",
                value=type(pipeline.mask).__name__,
            )

    def fingerprint(self) -> dict[str, Any]:
        arguments = {"buffer_size": self.buffer_size, "staleness_exponent": self.staleness_exponent}
        return {"class": type(self).__name__, **arguments, "speeds": self.speeds.fingerprint()}


class BufferedServer(FederatedServer):
    """A server whose clients start from its state at their download, and arrive some steps later."""

    def __init__(self, synchronization: FedBuff, current_round: Callable[[], int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._schedule = synchronization
        self._round = current_round
        self._following = 0  # the round after the last one that was finished
        self._versions: dict[int, State] = {}  # from which somebody is under way, or may be in this round

    def start_round(
        self,
        module: nn.Module,
        rules: ReductionRules | None = None,
        extra_tensors: ExtraTensors | None = None,
        round_idx: int = 0,
    ) -> None:
        super().start_round(module, rules, extra_tensors, round_idx)
        self._schedule.check_reductions(self.reductions)  # a module declares them in each round anew
        round_idx = self._round()
        self._schedule.start_round(round_idx)
        earlier = {version: self._like_now(state) for version, state in self._versions.items() if version != round_idx}
        self._versions = {**earlier, round_idx: self.state}

    def _like_now(self, version: State) -> State:
        """An earlier state on the device of the present one: a checkpoint's comes back on the CPU."""
        changing = {name: value for name, value in self.state.items() if not self.reductions[name].once}
        for name, value in changing.items():
            if name not in version or version[name].shape != value.shape:
                raise InvalidValueError(
                    f"Expected the state that a client has downloaded to have `{name}` of shape {tuple(value.shape)} "
                    "but it is not so: the module has changed, or a checkpoint is damaged.",
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
        """Return a client's upload of an entry as if it had started with the server's present state.

        The update of a trainable parameter counts less if it is stale. Other entries stay as they are.
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
                f"Expected `{_KEPT}` of the checkpoint to say who is under way, and from which state, but got "
                f"{buffer_state!r:.200}.",
                hint="Resume from another checkpoint.",
                argument=_KEPT,
                value=buffer_state,
            )
        self._schedule.load_state_dict(buffer_state)
        self._following, self._versions = buffer_state["round"], dict(buffer_state["versions"])


def _is_whole(buffer_state: Mapping[str, Any]) -> bool:
    """Whether a clock of a checkpoint is one, with the states from which clients are under way."""
    versions, flights = buffer_state.get("versions"), buffer_state.get("flights")
    if not (isinstance(versions, Mapping) and isinstance(flights, list)):
        return False
    kinds = (int, int, str, int)
    return (
        all(isinstance(buffer_state.get(name), int) for name in ("round", "now"))
        and all(isinstance(one, list) and tuple(map(type, one)) == kinds and one[3] in versions for one in flights)
        and all(isinstance(of, Mapping) and all(isinstance(v, Tensor) for v in of.values()) for of in versions.values())
    )
