"""Processes of one federation that reach each other by gloo, a backend of `torch.distributed`."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from lightning_fcl.errors import ConnectionFailedError
from lightning_fcl.federation.ranks import Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")

RENDEZVOUS_VARIABLE = "LIGHTNING_FCL_RENDEZVOUS"  # where the processes of one machine find each other
_TIMEOUT = timedelta(hours=12)  # a rank waits for the slowest one of a round
_SHORT = 4096  # bytes that ranks tell each other at once
_START = timedelta(minutes=30)  # and for the others to start
_meetings = itertools.count()  # of this process


class GlooRanks:
    """Processes that reach each other by gloo, in a group of their own.

    It is not the default group of `torch.distributed`: what else runs in a process, such as a metric, would take it for
    a sign that each of its steps is one of all processes.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._group = ProcessGroupGloo(store, rank, num_ranks, _TIMEOUT)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlooRanks:
        return self  # whoever is copied is in the same process

    def all_gather_object(self, value: T) -> Sequence[T]:
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

    def all_reduce(self, numbers: Tensor) -> None:
        here = numbers.cpu()
        with _explained():
            self._group.allreduce([here]).wait()  # type: ignore[attr-defined]
        if here is not numbers:
            numbers.copy_(here)

    def close(self) -> None:
        self._group.abort()

    def _gather(self, content: Tensor, length: int) -> list[Tensor]:
        mine = torch.nn.functional.pad(content, (0, length - len(content)))  # or cut
        found = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        with _explained():
            self._group.allgather([found], [mine]).wait()  # type: ignore[attr-defined]
        return found


@contextmanager
def _explained() -> Iterator[None]:
    """Say in one sentence that another rank has gone."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionFailedError(
            "Expected all processes of the federation to meet at the end of a round but one of them has gone: what it "
            "said, if anything, stands above.",
            hint="Resume from the newest checkpoint, with any number of `devices`.",
        ) from error


def connect_ranks(environment: ClusterEnvironment, rank: int, num_ranks: int, nodes: int) -> Ranks:
    """Find the other processes: those of this machine by a file, those of others by the environment's address."""
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    if nodes == 1:  # nobody else is to hear them
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    where = os.environ.get(RENDEZVOUS_VARIABLE, "env://") if nodes == 1 else "env://"
    if nodes > 1:
        log.warning(
            "Waiting for the %d processes of %d machines at %s:%s.",
            num_ranks,
            nodes,
            os.environ["MASTER_ADDR"],
            os.environ["MASTER_PORT"],
        )

    found: Future[Ranks] = Future()

    def find() -> None:
        try:
            store, _, _ = next(rendezvous(where, rank, num_ranks, timeout=_START))
            found.set_result(GlooRanks(PrefixStore(f"federation {next(_meetings)}", store), rank, num_ranks))
        except BaseException as error:
            found.set_exception(error)

    Thread(target=find, daemon=True).start()  # no signal would be heard here while it waits
    return found.result()
