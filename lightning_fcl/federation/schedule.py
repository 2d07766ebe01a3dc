"""The clock of a rehearsed deployment: who is in time for a round, who is late, and how long the round takes.

A schedule is a function of the seed, the plan, who takes part, the clients' speeds and the sizes of messages; nothing
that training decides changes it. So it is known beforehand, the same on every machine, and whoever is late is not
trained at all. The clock counts whole nanoseconds: sums of times do not depend on their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fcl.data.scenarios import Plan
from lightning_fcl.errors import above, at_least
from lightning_fcl.federation.compression import Compression
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.speeds import Speeds

if TYPE_CHECKING:
    from lightning_fcl.federation.participation import Participation

__all__ = ["Deadline", "Deployment", "Schedule", "TimedRound"]

NANO = 10**9


@dataclass(frozen=True)
class Deployment:
    """What a schedule is made for.

    Args:
        local_epochs: Passes over a client's samples per round.
        download_bytes: Bytes that each client receives in a round, as ``upload_bytes`` those that it sends.
        reductions: The reduction of each entry of the server's state.
    """

    plan: Plan
    participation: Participation
    local_epochs: int = 1
    download_bytes: int = 0
    upload_bytes: int = 0
    reductions: Mapping[str, Reduction] = field(default_factory=dict)


@dataclass(frozen=True)
class TimedRound:
    """What the clock says of a round.

    Args:
        clients: The clients whose uploads count, in the plan's order.
        skipped: Clients that were drawn but have no data.
        late: Clients whose uploads come too late.
        seconds: Seconds from the end of the round before.
        staleness: Rounds that have ended since a client's download, where there are any.
    """

    clients: list[str]
    skipped: list[str]
    late: list[str] = field(default_factory=list)
    seconds: float = 0.0
    staleness: dict[str, int] = field(default_factory=dict)


class Schedule(ABC):
    """When the uploads of clients, who are so fast, come, and which of them make up a round."""

    deployment: Deployment
    """What it was begun with."""

    def __init__(self, speeds: Speeds) -> None:
        if not isinstance(speeds, Speeds):
            raise TypeError(f"Expected `speeds` to be `Speeds`, such as `Speeds(0.01)`, but got {speeds!r:.100}.")
        self.speeds = speeds

    def begin(self, deployment: Deployment, round: int = 0) -> None:
        """Take over what it is made for; a fit goes on from ``round``.

        Raises:
            ValueError: If the two do not go together.
        """
        self.speeds.check_clients(deployment.plan.clients)
        self.deployment = deployment

    @abstractmethod
    def timed(self, round: int) -> TimedRound:
        """What the clock says of a round, also of one that is yet to come.

        Raises:
            ValueError: If no client has data in the round.
        """

    def server(self, current_round: Callable[[], int]) -> Callable[..., FederatedServer]:
        """What makes the server, which is told the round, from the arguments of a `FederatedServer`."""
        return FederatedServer

    def check(self, compression: Compression | None) -> None:
        """Refuse settings of the strategy that do not go with it."""
        return

    @abstractmethod
    def hparams(self) -> dict[str, Any]:
        """The arguments, for checkpoints."""

    def duration(self, client: str, round: int) -> int:
        """Nanoseconds of a client that downloads in a round, from there to the end of its upload."""
        of = self.deployment
        samples = of.local_epochs * len(of.plan.train[round][client])
        seed, sizes = of.participation.seed, (of.download_bytes, of.upload_bytes)
        return round_to_nano(self.speeds.seconds(client, round, seed, samples, *sizes))


def round_to_nano(seconds: float) -> int:
    return round(seconds * NANO)


def in_order(plan: Plan, clients: Collection[str]) -> list[str]:
    return [client for client in plan.clients if client in clients] if clients else []


class Deadline(Schedule):
    """Synchronous rounds that end when enough uploads have come, or at a deadline (Bonawitz et al. 2019, section 2.2).

    Whoever takes longer for download, training and upload is late, as if it had not been drawn. If nobody is in time,
    the round waits for the first. Draw more clients than the ``goal`` (the paper 1.3 times as many): the round does not
    wait for the slowest.

    Args:
        speeds: How fast clients are.
        seconds: Seconds from a round's beginning after which no upload counts; None: the round waits.
        goal: Number of uploads with which a round ends; None: all that are in time.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``speeds`` are something else.

    Example:
        >>> from lightning_fcl import FederatedStream
        >>> from lightning_fcl.federation.participation import Participation
        >>> stream = FederatedStream("digits")
        >>> stream.setup("fit")
        >>> deadline = Deadline(Speeds(0.01, clients={"3": {"latency": 60}}), seconds=30)
        >>> deadline.begin(Deployment(stream.plan, Participation(schedule=deadline)))
        >>> deadline.timed(round=0).late
        ['3']
    """

    def __init__(self, speeds: Speeds, seconds: float | None = None, goal: int | None = None) -> None:
        super().__init__(speeds)
        if seconds is not None:
            above(0, seconds=seconds)
        if goal is not None:
            at_least(1, goal=goal)
        self.seconds = seconds
        self.goal = goal
        self._asked: tuple[int, list[str], TimedRound] | None = None  # the round that was looked at last

    def begin(self, deployment: Deployment, round: int = 0) -> None:
        super().begin(deployment, round)
        self._asked = None

    def timed(self, round: int) -> TimedRound:
        of = self.deployment
        drawn, skipped = of.participation.chosen(of.plan, round)
        if self._asked is None or self._asked[:2] != (round, drawn):
            self._asked = round, drawn, self._timed(round, drawn, skipped)
        return self._asked[2]

    def _timed(self, round: int, drawn: list[str], skipped: list[str]) -> TimedRound:
        arrives = {client: self.duration(client, round) for client in drawn}
        first = sorted(drawn, key=arrives.__getitem__)  # stable: of those that come at once, in the plan's order
        limit = arrives[first[-1]] if self.seconds is None else round_to_nano(self.seconds)
        counted = [client for client in first if arrives[client] <= limit][: self.goal] or first[:1]
        last, taken = arrives[counted[-1]], {*counted}
        late = [client for client in drawn if client not in taken]
        in_vain = bool(late) and len(counted) != self.goal and last <= limit  # it waits until the deadline
        end = limit if in_vain else last
        return TimedRound([client for client in drawn if client in taken], skipped, late, end / NANO)

    def hparams(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "seconds": self.seconds,
            "goal": self.goal,
            "speeds": self.speeds.hparams(),
        }
