"""Ranks: processes that share out the clients of a federation; how they meet by gloo, and what they tell each other."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
log = logging.getLogger(__name__)
_TIMEOUT = timedelta(hours=12)  # a rank waits for the slowest one of a round
_SHORT = 4096  # bytes that ranks tell each other at once
_START = timedelta(minutes=30)  # and for the others to start
MEETING = "LIGHTNING_FCL_MEETING"  # where the processes of one machine find each other
_MOST = max(64, 4 * (os.cpu_count() or 1))  # processes of one machine
_meetings = itertools.count()  # of this process


class Ranks(Protocol):
    """The processes that run one federation. All of them call all of this, in the same order.

    What they hand each other has no order that a result could depend on: whole numbers are added up, and other values
    come back by rank.
    """

    @property
    def number(self) -> int:
        """How many there are."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    def share(self, value: T) -> Sequence[T]:
        """What each of them has, by rank."""

    def add_up(self, numbers: Tensor) -> None:
        """Let whole numbers, shape (n,), become their sum over all ranks, in place."""


class OneRank:
    """A federation in a single process."""

    number = 1
    rank = 0

    def share(self, value: T) -> Sequence[T]:
        return [value]

    def add_up(self, numbers: Tensor) -> None:
        return


ALONE = OneRank()
"""A process that runs a federation on its own."""


def share_by_client(ranks: Ranks, mine: Mapping[str, T], order: Sequence[str]) -> dict[str, T]:
    """What all ranks have for clients, each of which is one rank's: of several ranks in an order of the clients."""
    if ranks.number == 1:
        return dict(mine)
    found = {client: value for part in ranks.share(dict(mine)) for client, value in part.items()}
    return {client: found[client] for client in order if client in found}


class GlooRanks:
    """Processes that reach each other by gloo, in a group of their own.

    It is not the default group of `torch.distributed`: what else runs in a process, such as a metric, would take it for
    a sign that each of its steps is one of all processes.
    """

    def __init__(self, store: Store, rank: int, number: int) -> None:
        self.number, self.rank = number, rank
        self._group = ProcessGroupGloo(store, rank, number, _TIMEOUT)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlooRanks:
        return self  # whoever is copied is in the same process

    def share(self, value: T) -> Sequence[T]:
        content = pickle.dumps(value)
        mine = torch.frombuffer(bytearray(len(content).to_bytes(8, "little") + content), dtype=torch.uint8)
        found = self._gather(mine, _SHORT)  # most of what is said is short: they meet once
        ends = [8 + int.from_bytes(rows[:8].numpy().tobytes(), "little") for rows in found]
        if max(ends) > _SHORT:
            found = self._gather(mine, max(ends))
        others = zip(found, ends, strict=True)
        return [
            value if rank == self.rank else pickle.loads(rows[8:end].numpy().tobytes())
            for rank, (rows, end) in enumerate(others)
        ]

    def add_up(self, numbers: Tensor) -> None:
        here = numbers.cpu()
        with _explained():
            self._group.allreduce([here]).wait()  # type: ignore[attr-defined]
        if here is not numbers:
            numbers.copy_(here)

    def leave(self) -> None:
        self._group.abort()

    def _gather(self, content: Tensor, length: int) -> list[Tensor]:
        mine = torch.nn.functional.pad(content, (0, length - len(content)))  # or cut
        found = [torch.empty_like(mine) for _ in range(self.number)]
        with _explained():
            self._group.allgather([found], [mine]).wait()  # type: ignore[attr-defined]
        return found


@contextmanager
def _explained() -> Iterator[None]:
    """Say in one sentence that another rank has gone."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(
            "Expected all processes of the federation to meet at the end of a round but one of them has gone: what it "
            "said, if anything, stands above. Go on from the newest checkpoint, with any number of `devices`."
        ) from error


def meet(environment: ClusterEnvironment, rank: int, number: int, nodes: int) -> Ranks:
    """Find the other processes: those of this machine by a file, those of others by the environment's address."""
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    if nodes == 1:  # nobody else is to hear them
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    where = os.environ.get(MEETING, "env://") if nodes == 1 else "env://"
    if nodes > 1:
        log.warning(
            "Waiting for the %d processes of %d machines at %s:%s.",
            number,
            nodes,
            os.environ["MASTER_ADDR"],
            os.environ["MASTER_PORT"],
        )

    found: Future[Ranks] = Future()

    def find() -> None:
        try:
            store, _, _ = next(rendezvous(where, rank, number, timeout=_START))
            found.set_result(GlooRanks(PrefixStore(f"federation {next(_meetings)}", store), rank, number))
        except BaseException as error:
            found.set_exception(error)

    Thread(target=find, daemon=True).start()  # no signal would be heard here while it waits
    return found.result()


def check_processes(environment: ClusterEnvironment, processes: int, nodes: int) -> None:
    """Refuse more processes than a machine can start, and machines that could not find each other."""
    if processes > _MOST:
        raise ValueError(
            f"Expected at most {_MOST} `devices`, a process each, on this machine but got {processes}. Set as many as "
            "it has cores, or fewer."
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if nodes > 1 and missing and isinstance(environment, LightningEnvironment):
        raise ValueError(
            f"Expected each of `num_nodes={nodes}` machines to have MASTER_ADDR, MASTER_PORT and NODE_RANK in its "
            f"environment but {', '.join(missing)} is not set: they would wait for each other. Set them as "
            "docs/scale.md tells, or leave `num_nodes` out."
        )
