"""FedBuff: asynchronous rounds, in which the server steps whenever its buffer of uploads is full."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_fcl.errors import at_least
from lightning_fcl.federation.buffered_server import BufferedServer
from lightning_fcl.federation.compression import Compression
from lightning_fcl.federation.participation import lots, number_of
from lightning_fcl.federation.reductions import Mean, Reduction
from lightning_fcl.federation.schedule import NANO, Deployment, Schedule, TimedRound, in_order
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.speeds import Speeds

__all__ = ["FedBuff"]


@dataclass(frozen=True, order=True)
class Flight:
    """A client from its download, of a round's state, to its arrival, in nanoseconds; of equals the first by place."""

    arrives: int
    place: int
    client: str
    version: int


@dataclass(frozen=True)
class Clock:
    """The state of a deployment between two steps of the server."""

    now: int = 0
    flights: tuple[Flight, ...] = ()


@dataclass(frozen=True)
class _Known:
    """A round that was looked at: who was unavailable then, what the clock says of it, and the clock after it."""

    unavailable: frozenset[str]
    timed: TimedRound
    clock: Clock


class FedBuff(Schedule):
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
        >>> FedBuff(Speeds(0.01, spread=0.5), buffer_size=10).scale(staleness=3)
        0.5
    """

    def __init__(self, speeds: Speeds, buffer_size: int, staleness_exponent: float = 0.5) -> None:
        super().__init__(speeds)
        at_least(1, buffer_size=buffer_size)
        at_least(0, staleness_exponent=staleness_exponent)
        self.buffer_size = buffer_size
        self.staleness_exponent = staleness_exponent
        self._first = 0  # of the rounds that this fit knows
        self._start = Clock()
        self._known: dict[int, _Known] = {}

    def scale(self, staleness: int) -> float:
        """The factor of what an upload adds that is so many steps behind."""
        return float((1 + staleness) ** -self.staleness_exponent)

    def begin(self, deployment: Deployment, round: int = 0) -> None:
        super().begin(deployment, round)
        clients = len(deployment.plan.clients)
        if self.buffer_size > clients:
            raise ValueError(
                f"Expected `buffer_size` to be at most the stream's {clients} clients but got {self.buffer_size}: a "
                "client has one upload in it at a time. Lower it."
            )
        self.check_reductions(deployment.reductions)
        if round == 0:
            self.restore(0, Clock())

    def restore(self, round: int, clock: Clock) -> None:
        """Go on from the clock at the beginning of a round."""
        self._first, self._start, self._known = round, clock, {}

    def timed(self, round: int) -> TimedRound:
        return self._at(round).timed

    def clock(self, round: int) -> Clock:
        return self._start if round == self._first else self._at(round - 1).clock

    def under_way(self, round: int) -> list[int]:
        """The rounds from whose states somebody is under way when a round begins, ascending."""
        return sorted({flight.version for flight in self.clock(round).flights})

    def state_dict(self, round: int) -> dict[str, Any]:
        """The clock at the beginning of a round, as plain values."""
        clock = self.clock(round)
        flights = [[one.arrives, one.place, one.client, one.version] for one in clock.flights]
        return {"round": round, "now": clock.now, "flights": flights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restore(state["round"], Clock(state["now"], tuple(Flight(*one) for one in state["flights"])))

    def enter(self, round: int) -> None:
        """A round begins: who takes part in it stays as it is, and nobody asks for earlier ones any more."""
        self._start, self._first = self.clock(round), round
        self._known = {number: known for number, known in self._known.items() if number >= round}

    def _at(self, round: int) -> _Known:
        if round < self._first:
            raise ValueError(f"Expected a round from {self._first} on but got {round}, which has passed.")
        for number in range(self._first, round + 1):
            gone = frozenset(self.deployment.participation.unavailable(number))
            known = self._known.get(number)
            if known is None or (number > self._first and known.unavailable != gone):
                self._known = {earlier: of for earlier, of in self._known.items() if earlier < number}
                self._known[number] = _Known(gone, *self._advanced(number, self.clock(number), gone))
        return self._known[round]

    def _advanced(self, round: int, clock: Clock, gone: Collection[str]) -> tuple[TimedRound, Clock]:
        """Let time pass until the buffer is full: a round, and the clock after it."""
        plan, now = self.deployment.plan, clock.now
        present = plan.train[round].keys() - gone
        flights, staleness, skipped = [*clock.flights], dict[str, int](), set[str]()
        waiting = self._waiting(round, present, {flight.client for flight in flights})
        while len(staleness) < self.buffer_size:
            if not (flights and flights[0].arrives <= now):  # all that arrive now have arrived
                self._fill(flights, waiting, round, now)
            if not flights:
                break
            flight = heapq.heappop(flights)
            now = max(now, flight.arrives)
            if flight.client in present:
                staleness[flight.client] = round - flight.version
            else:
                skipped.add(flight.client)
        if not staleness:
            raise ValueError(
                f"Expected at least one client with data in round {round} but none has any. Lower `max_epochs`."
            )
        clients, seconds = in_order(plan, staleness), (now - clock.now) / NANO
        stale = {client: staleness[client] for client in clients if staleness[client]}
        return TimedRound(clients, in_order(plan, skipped), [], seconds, stale), Clock(now, tuple(flights))

    def _waiting(self, round: int, present: Collection[str], under_way: Collection[str]) -> list[int]:
        """The places of those who may start with a round's state, the first to start last."""
        clients = self.deployment.plan.clients
        order = lots(self.deployment.plan, round, self.deployment.participation.seed)[::-1].tolist()
        return [place for place in order if clients[place] in present and clients[place] not in under_way]

    def _fill(self, flights: list[Flight], waiting: list[int], round: int, now: int) -> None:
        """Let clients download as long as there is room."""
        clients = self.deployment.plan.clients
        room = number_of(self.deployment.participation.clients, len(clients)) - len(flights)
        for _ in range(min(room, len(waiting))):
            place = waiting.pop()
            client = clients[place]
            heapq.heappush(flights, Flight(now + self.duration(client, round), place, client, round))

    def server(self, current_round: Callable[[], int]) -> Callable[..., FederatedServer]:
        return partial(BufferedServer, self, current_round)

    def check_reductions(self, reductions: Mapping[str, Reduction]) -> None:
        """Refuse reductions of what clients send that are no means."""
        for name, reduction in reductions.items():
            if reduction.up and type(reduction) is not Mean:
                raise ValueError(
                    f"Expected `mean` as the reduction of all that clients send in asynchronous rounds but `{name}` "
                    f"has `{reduction}`: what it makes of uploads to different states of the server is not defined. "
                    "Use a `Deadline`, or a model or method without it."
                )

    def check(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(
                f"Expected no `compression` beside `FedBuff` but got {compression.hparams()}: a code refers to the "
                "server's state at the upload, which an asynchronous client does not know. Leave one out."
            )

    def hparams(self) -> dict[str, Any]:
        own = {"buffer_size": self.buffer_size, "staleness_exponent": self.staleness_exponent}
        return {"class": type(self).__name__, **own, "speeds": self.speeds.hparams()}
