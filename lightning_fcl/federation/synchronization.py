"""Client sampling and timing: which clients train in a round, and which uploads arrive in time.

Sampling and timing depend on the seed, the plan, the settings, the clients' names, their speeds, the sizes of messages,
and the clients that were withdrawn in earlier rounds. Values that training computes have no influence. Therefore
sampling and timing are computed before the round, and are identical on every machine. A late client does not train. The
clock counts nanoseconds as integers, so that sums of times do not depend on the order of addition.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.batching import round_half_up
from lightning_fcl.data.scenarios import Plan
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.rng import derive_keys
from lightning_fcl.validation import above, at_least, between, check_arguments

__all__ = ["Deadline", "Participation", "Poisson", "RoundTiming", "Synchronization", "TimingContext"]

NANO = 10**9

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimingContext:
    """The properties of a federation that a `Synchronization` needs to compute the timing of rounds.

    Args:
        plan: The plan of the stream.
        client_participation: The client sampling.
        local_epochs: Passes over a client's samples per round.
        download_bytes: Estimated number of bytes that each client downloads in a round.
        upload_bytes: Estimated number of bytes that each client uploads in a round.
        reductions: The reduction of each entry of the server's state.
    """

    plan: Plan
    client_participation: Participation
    local_epochs: int = 1
    download_bytes: int = 0
    upload_bytes: int = 0
    reductions: Mapping[str, Reduction] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundTiming:
    """The timing of a round.

    Args:
        clients: Clients whose uploads count, in the plan's order.
        no_data: Sampled clients that have no data, or too few samples to train on.
        late_clients: Clients whose uploads arrive too late. These clients do not train.
        duration_s: Duration in seconds, from the end of the previous round to the end of this round.
        staleness: For each client, the number of rounds that ended since the client's download. Clients with 0 are left
            out.
    """

    clients: list[str]
    no_data: list[str]
    late_clients: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    staleness: dict[str, int] = field(default_factory=dict)


class Synchronization(ABC):
    """Base class of the rules that define the arrival time of each upload, and the uploads that belong to a round.

    Args:
        speeds: Speeds of the clients.

    Raises:
        TypeError: If ``speeds`` is not a `ClientSpeeds`.
    """

    context: TimingContext
    """The context that was passed to `start`."""

    time: ClassVar[str] = "per round"
    """Phrase in messages after the number of training clients, as in "3 of 10 clients per round"."""

    def __init__(self, speeds: ClientSpeeds) -> None:
        if not isinstance(speeds, ClientSpeeds):
            raise InvalidTypeError(
                f"Expected `speeds` to be `ClientSpeeds`, such as `ClientSpeeds(0.01)`, but got {speeds!r:.100}.",
                argument="speeds",
                value=speeds,
            )
        self.speeds = speeds

    def start(self, context: TimingContext, round_idx: int = 0) -> None:
        """Prepare to compute the timing of a federation. The fit starts or resumes at ``round_idx``."""
        self.speeds.check_clients(context.plan.clients)
        self.context = context

    @abstractmethod
    def round_timing(self, round_idx: int) -> RoundTiming:
        """Return the timing of the current round or a future round."""

    def server(self, current_round: Callable[[], int]) -> Callable[..., FederatedServer]:
        """Return a function that makes the server from the arguments of `FederatedServer`.

        Args:
            current_round: Function that returns the index of the current round.
        """
        return FederatedServer

    def check(self, pipeline: Pipeline) -> None:
        """Raise InvalidValueError if the synchronization does not support the upload transforms of ``pipeline``."""
        return

    def client_duration_ns(self, client: str, round_idx: int) -> int:
        """Return the duration of a client's download, training and upload in a round, in nanoseconds."""
        context = self.context
        samples = context.local_epochs * len(context.plan.train[round_idx][client])
        seed, sizes = context.client_participation.seed, (context.download_bytes, context.upload_bytes)
        return nanoseconds(self.speeds.seconds(client, round_idx, seed, samples, *sizes))

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must match to be resumed."""


def nanoseconds(seconds: float) -> int:
    return round(seconds * NANO)


class Deadline(Synchronization):
    """Synchronous rounds with a deadline (Bonawitz et al., 2019, section 2.2).

    A round ends when ``target_uploads`` uploads or all uploads have arrived, or at the deadline. The uploads that have
    arrived by then count, at most ``target_uploads``. All other sampled clients are late. They download the server's
    state, but do not train and keep their client states. If no upload arrives before the deadline, the round waits for
    the first upload. Sample more clients than ``target_uploads`` (1.3 times as many in the paper), so that the round
    does not wait for the slowest clients.

    Args:
        speeds: Speeds of the clients.
        timeout: Deadline in seconds after the start of a round. Later uploads do not count. None: no deadline.
        target_uploads: Number of uploads at which a round ends. None: the round ends when all uploads have arrived, or
            at the deadline.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``speeds`` is not a `ClientSpeeds`.

    Example:
        >>> from lightning_fcl import FederatedStream
        >>> stream = FederatedStream("digits")
        >>> stream.setup("fit")
        >>> deadline = Deadline(ClientSpeeds(0.01, per_client={"3": {"latency": 60}}), timeout=30)
        >>> deadline.start(TimingContext(stream.plan, Participation(synchronization=deadline)))
        >>> deadline.round_timing(round_idx=0).late_clients
        ['3']
    """

    citations: ClassVar[tuple[str, ...]] = ("bonawitz2019scale",)

    @check_arguments
    def __init__(self, speeds: ClientSpeeds, timeout: float | None = None, target_uploads: int | None = None) -> None:
        super().__init__(speeds)
        if timeout is not None:
            above(0, timeout=timeout)
        if target_uploads is not None:
            at_least(1, target_uploads=target_uploads)
        self.timeout = timeout
        self.target_uploads = target_uploads
        # The timing of the latest call, with its arguments.
        self._known: tuple[TimingContext, int, list[str], RoundTiming] | None = None

    def round_timing(self, round_idx: int) -> RoundTiming:
        context = self.context
        sampled_clients, skipped = context.client_participation.sample_clients(context.plan, round_idx)
        if self._known is not None and self._known[0] is context and self._known[1:3] == (round_idx, sampled_clients):
            return self._known[3]
        arrives = {client: self.client_duration_ns(client, round_idx) for client in sampled_clients}
        # The sort is stable, so uploads that arrive at the same time keep the plan's order.
        first = sorted(sampled_clients, key=arrives.__getitem__)
        limit = arrives[first[-1]] if self.timeout is None else nanoseconds(self.timeout)
        counted_clients = [client for client in first if arrives[client] <= limit][: self.target_uploads] or first[:1]
        last, in_time = arrives[counted_clients[-1]], {*counted_clients}
        late = [client for client in sampled_clients if client not in in_time]
        # If too few uploads arrive, the round waits until the deadline.
        in_vain = bool(late) and len(counted_clients) != self.target_uploads and last <= limit
        end = limit if in_vain else last
        timed = RoundTiming([client for client in sampled_clients if client in in_time], skipped, late, end / NANO)
        self._known = context, round_idx, sampled_clients, timed
        return timed

    def fingerprint(self) -> dict[str, Any]:
        arguments = {"seconds": self.timeout, "goal": self.target_uploads}
        return {"class": type(self).__name__, **arguments, "speeds": self.speeds.fingerprint()}


class Poisson:
    """Poisson sampling of clients: each client is sampled for a round independently, with the same probability.

    The number of sampled clients differs between rounds and can be 0. Clients without data are also sampled. A round is
    never filled up with other clients. The amplification of `DifferentialPrivacy` by sampling requires this sampling.

    Args:
        prob: Probability that a client is sampled, above 0 and at most 1.

    Raises:
        ValueError: If ``prob`` is out of range.

    Example:
        >>> Poisson(0.3).expected_clients(20)
        6.0
    """

    @check_arguments
    def __init__(self, prob: float) -> None:
        above(0, prob=prob)
        between(0, 1, prob=prob)
        self.prob = prob

    def expected_clients(self, num_clients: int) -> float:
        """Return the expected number of sampled clients among ``num_clients`` clients."""
        return self.prob * num_clients

    def draw(self, plan: Plan, round_idx: int, seed: int) -> list[str]:
        """Return the clients that are sampled for a round, in the plan's order."""
        keys = derive_keys(plan.client_keys, seed, round_idx, "participation")
        flags = keys / np.float64(2.0**64) < self.prob
        return list(itertools.compress(plan.clients, flags.tolist()))

    def fingerprint(self) -> dict[str, Any]:
        """Return the arguments, which a checkpoint must match to be resumed."""
        return {"class": type(self).__name__, "prob": self.prob}

    def __repr__(self) -> str:
        return f"Poisson({self.prob})"


def count_sampled_clients(participation: float | int | Poisson, num_clients: int) -> int:
    """Return the number of clients to sample per round, at least 1.

    ``participation`` is a fraction of all clients (float), or a number of clients (int), which is returned unchanged.
    For `Poisson`, the result is the expected number, rounded.

    Example:
        >>> count_sampled_clients(0.25, 10), count_sampled_clients(0.01, 10), count_sampled_clients(4, 10)
        (3, 1, 4)
    """
    if isinstance(participation, Poisson):
        participation = participation.prob
    return max(1, round_half_up(participation * num_clients) if isinstance(participation, float) else participation)


def draw_client_order(plan: Plan, round_idx: int, seed: int) -> NDArray[np.int64]:
    """Return the random order of the clients in a round, as their positions in the plan, shape (clients,)."""
    return np.argsort(derive_keys(plan.client_keys, seed, round_idx, "participation"), kind="stable")


class Participation:
    """The client sampling of a federation: which clients train in each round.

    The random order of the clients in a round depends only on the seed, the round and the clients' names, not on
    earlier rounds.

    Attributes:
        min_samples: Number of samples that a client needs to train in a round. A client with fewer samples counts as a
            client without data.

    Args:
        fraction_or_count: Number of clients per round. A float is a fraction of all clients (1.0: all clients), an int
            is a number. At least one client is sampled. Clients are sampled again in each round. With `Poisson`, each
            client is sampled independently.
        seed: Seed of the sampling.
        swarm: The swarm, whose nodes can leave or miss a synchronization. None: a federation with a server.
        synchronization: Rule for the uploads that arrive in time on the simulated clock. None: all uploads count.

    Raises:
        ValueError: If ``fraction_or_count`` is out of range, if both ``swarm`` and ``synchronization`` are given, or if
            one of them is given with `Poisson`.

    Example:
        >>> participation = Participation(fraction_or_count=2, swarm=Swarm(leaves_at={"client1": 3}))
        >>> participation.withdraw("client4")
        >>> sorted(participation.unavailable(2)), sorted(participation.unavailable(3))
        (['client4'], ['client1', 'client4'])
    """

    def __init__(
        self,
        fraction_or_count: int | float | Poisson = 1.0,
        seed: int = 0,
        swarm: Swarm | None = None,
        synchronization: Synchronization | None = None,
    ) -> None:
        if isinstance(fraction_or_count, Poisson):
            for name, setting in (("swarm", swarm), ("synchronization", synchronization)):
                if setting is not None:
                    raise InvalidValueError(
                        f"Expected no `{name}` with `participation=Poisson(...)`, which samples each client "
                        f"independently, but got a `{type(setting).__name__}`.",
                        hint=f"Remove `{name}`, or use a number as `participation`.",
                        argument=name,
                        value=setting,
                    )
        elif not fraction_or_count > 0 or (isinstance(fraction_or_count, float) and fraction_or_count > 1):
            raise InvalidValueError(
                "Expected `participation` to be a fraction above 0 and at most 1.0, or a number of clients, but got "
                f"{fraction_or_count}.",
                hint="Use 1.0 for all clients.",
                argument="participation",
                value=fraction_or_count,
            )
        if swarm is not None and synchronization is not None:
            raise InvalidValueError(
                "Expected either `swarm` or `synchronization`, but got both. "
                f"`{type(synchronization).__name__}` requires a server, which a swarm does not have.",
                hint="Remove `swarm` or `synchronization`.",
                argument="swarm",
                value=swarm,
            )
        self.fraction_or_count = fraction_or_count
        self.seed = seed
        self.swarm = swarm
        self.synchronization = synchronization
        self.min_samples = 1
        self.withdrawn_clients: set[str] = set()
        # Master of the previous round.
        self._master: str | None = None

    @property
    def explicit_clients(self) -> list[str]:
        """Names of clients in the settings of the speeds and the swarm. Each must be a client of the stream."""
        speed_clients = self.synchronization.speeds.explicit_clients if self.synchronization is not None else []
        return [*speed_clients, *(self.swarm.explicit_nodes if self.swarm is not None else ())]

    @property
    def may_miss_sync(self) -> bool:
        """Whether clients can miss a synchronization and continue from their own state."""
        return self.swarm is not None and bool(self.swarm.missed_sync_prob or self.swarm.missed_rounds)

    @property
    def is_full(self) -> bool:
        """Whether every client with data trains and uploads in each round.

        True if ``fraction_or_count`` is 1.0 (a float), and there is no swarm and no synchronization.
        """
        everyone = isinstance(self.fraction_or_count, float) and self.fraction_or_count == 1.0
        return everyone and self.swarm is None and self.synchronization is None

    def describe(self, clients: int) -> str:
        """Return the number of training clients as text, for example "1 of 10 clients per round"."""
        if isinstance(self.fraction_or_count, Poisson):
            expected = self.fraction_or_count.expected_clients(clients)
            return f"{expected:g} of {clients} clients per round on average"
        time = "per round" if self.synchronization is None else self.synchronization.time
        return f"{min(clients, count_sampled_clients(self.fraction_or_count, clients))} of {clients} clients {time}"

    def fingerprint(self) -> Any:
        """Return the number of clients per round, which a checkpoint must match to be resumed."""
        sampling = self.fraction_or_count
        return sampling.fingerprint() if isinstance(sampling, Poisson) else sampling

    def check_rounds(self, rounds: int) -> None:
        """Raise ValueError if the swarm's settings contain a round that is not below ``rounds``."""
        if self.swarm is None:
            return
        for round_idx in self.swarm.explicit_rounds:
            if round_idx >= rounds:
                raise InvalidValueError(
                    "Expected `missed_rounds` and `leaves_at` of the swarm to contain rounds of the stream, from 0 to "
                    f"{rounds - 1}, but got {round_idx}.",
                    hint="Use an earlier round.",
                    argument="leaves_at" if round_idx in self.swarm.leaves_at.values() else "missed_rounds",
                    value=round_idx,
                )

    def check_samples(self, plan: Plan, rounds: int) -> None:
        """Raise ValueError if there is a round among the first ``rounds`` rounds in which no client can train.

        If `min_samples` is 1, check nothing.
        """
        for round_idx in range(min(rounds, plan.num_rounds) if self.min_samples > 1 else 0):
            if not self.candidates(plan, round_idx):
                raise MissingValueError(
                    f"Expected an available client with at least {self.min_samples} samples in each round, but round "
                    f"{round_idx} has no such client. The module cannot train on a batch of one sample.",
                    hint="Use fewer clients or experiences, or replace batch normalization by group normalization.",
                    argument="min_samples",
                )

    def candidates(self, plan: Plan, round_idx: int) -> set[str]:
        """Return the clients that can train in a round: they are available and have enough samples."""
        current = plan.train[round_idx]
        present = current.keys() - self.unavailable(round_idx)
        # If any number of samples is sufficient, do not read the samples. The server of a deployment has no samples.
        if self.min_samples > 1:
            present = {client for client in present if not 0 < len(current[client]) < self.min_samples}
        return present

    def sample_on_time_clients(self, plan: Plan, round_idx: int) -> tuple[list[str], list[str]]:
        """Return the sampled clients whose uploads arrive in time, and the sampled clients without sufficient data.

        Without ``synchronization``, all uploads arrive in time. See `sample_clients`.
        """
        if self.synchronization is None:
            return self.sample_clients(plan, round_idx)
        timed = self.synchronization.round_timing(round_idx)
        return timed.clients, timed.no_data

    def sample_clients(self, plan: Plan, round_idx: int) -> tuple[list[str], list[str]]:
        """Return the sampled clients that can train in a round, and the available sampled clients with too little data.

        Both lists are in the plan's order. Unavailable clients do not change the sampling of other clients. If no
        sampled client can train, the first list contains one other client. With `Poisson`, both lists can be empty.

        Raises:
            ValueError: If no client can train in the round, except with `Poisson`.
        """
        clients, absent = plan.clients, self.unavailable(round_idx)
        present = self.candidates(plan, round_idx)
        if isinstance(self.fraction_or_count, Poisson):
            sampled_clients = self.fraction_or_count.draw(plan, round_idx, self.seed)
            training = [client for client in sampled_clients if client in present]
            return training, [client for client in sampled_clients if client not in present and client not in absent]
        if not present:
            absence_note = (
                f" and is available (unavailable: {', '.join(sorted(absent))}). Lower `max_epochs`" if absent else ""
            )
            raise InvalidValueError(
                f"Expected a client with enough data in round {round_idx}, but no client has enough data"
                f"{absence_note}.",
                argument="max_epochs",
            )
        number = count_sampled_clients(self.fraction_or_count, len(clients))
        if number >= len(clients) == len(present):
            return list(clients), []
        order = draw_client_order(plan, round_idx, self.seed).tolist()
        sampled_clients = [clients[place] for place in sorted(order[:number])]
        training = [client for client in sampled_clients if client in present]
        skipped = [client for client in sampled_clients if client not in present and client not in absent]
        return training or [next(clients[place] for place in order if clients[place] in present)], skipped

    def expected_clients(self, plan: Plan, round_idx: int) -> list[str]:
        """Return the clients expected to train in a round, in the plan's order. Return [] if no client can train."""
        return self.sample_on_time_clients(plan, round_idx)[0] if self.candidates(plan, round_idx) else []

    def unavailable(self, round_idx: int) -> set[str]:
        """Return the clients that left the swarm in a round or earlier, and all withdrawn clients."""
        return self.withdrawn_clients | (self.swarm.departed_nodes(round_idx) if self.swarm is not None else set())

    def withdraw(self, client: str) -> None:
        """Exclude a client from all later rounds."""
        self.withdrawn_clients.add(client)

    def misses_sync(self, client: str, round_idx: int) -> bool:
        """Return whether a client that trains in a round misses the synchronization of the round."""
        return self.swarm is not None and self.swarm.misses_sync(client, round_idx, self.seed)

    def elect_master(self, record: RoundRecord, clients: Sequence[str]) -> None:
        """Record the master of a round in a swarm. The transmitted bytes of the master count as 0."""
        if self.swarm is None:
            return
        record.master = self.swarm.elect_master([client for client in clients if client in record.upload_bytes])
        if record.master is None:
            return
        if self._master not in (None, *record.upload_bytes):
            log.warning(
                "The swarm's master %s uploaded nothing in this round. The new master is %s.",
                self._master,
                record.master,
            )
        self._master = record.master
        record.upload_bytes[record.master] = record.download_bytes[record.master] = 0
