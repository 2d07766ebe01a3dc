"""Communication between the processes of a federation with gloo, a backend of `torch.distributed`."""

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

RENDEZVOUS_VARIABLE = "LIGHTNING_FCL_RENDEZVOUS"  # environment variable with the URL of the rendezvous file
_TIMEOUT = timedelta(hours=12)  # long, because each rank waits for the slowest rank of a round
_SHORT = 4096  # size of the first message in bytes, including the 8 bytes for the length of the content
_START = timedelta(minutes=30)  # maximum time until all ranks have started
_meetings = itertools.count()  # counts the process groups of this process. Each group uses different keys.


class GlooRanks:
    """Processes that communicate with gloo, in a separate process group.

    The group is not the default group of `torch.distributed`. With a default group, other libraries, such as
    torchmetrics, would assume that all processes run every step together.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._group = ProcessGroupGloo(store, rank, num_ranks, _TIMEOUT)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlooRanks:
        return self  # A copy would use the same process group.

    def all_gather_object(self, value: T) -> Sequence[T]:
        content = pickle.dumps(value)
        local_content = torch.frombuffer(bytearray(len(content).to_bytes(8, "little") + content), dtype=torch.uint8)
        # Most messages are short, so one gather is usually enough.
        rank_contents = self._gather(local_content, _SHORT)
        ends = [8 + int.from_bytes(rows[:8].numpy().tobytes(), "little") for rows in rank_contents]
        if max(ends) > _SHORT:
            rank_contents = self._gather(local_content, max(ends))
        contents_and_ends = zip(rank_contents, ends, strict=True)
        return [
            value if rank == self.rank else pickle.loads(rows[8:end].numpy().tobytes())
            for rank, (rows, end) in enumerate(contents_and_ends)
        ]

    def all_reduce(self, numbers: Tensor) -> None:
        cpu_numbers = numbers.cpu()
        with _explained():
            self._group.allreduce([cpu_numbers]).wait()  # type: ignore[attr-defined]
        if cpu_numbers is not numbers:
            numbers.copy_(cpu_numbers)

    def close(self) -> None:
        self._group.abort()

    def _gather(self, content: Tensor, length: int) -> list[Tensor]:
        # A negative padding cuts the content.
        padded_content = torch.nn.functional.pad(content, (0, length - len(content)))
        rank_contents = [torch.empty_like(padded_content) for _ in range(self.num_ranks)]
        with _explained():
            self._group.allgather([rank_contents], [padded_content]).wait()  # type: ignore[attr-defined]
        return rank_contents


@contextmanager
def _explained() -> Iterator[None]:
    """Raise ConnectionFailedError with an explanation if the exchange fails, for example if another rank has exited."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionFailedError(
            "Expected all processes of the federation to exchange data, but the exchange failed. Another process has "
            "probably exited. Its error message, if any, is printed above.",
            hint="Resume from the newest checkpoint. The number of `devices` may differ.",
        ) from error


def connect_ranks(environment: ClusterEnvironment, rank: int, num_ranks: int, num_nodes: int) -> Ranks:
    """Connect to the other processes, and return the connection.

    On one machine, the processes connect through the rendezvous file, if there is one. Otherwise they connect through
    the main address and port of the environment.
    """
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    if num_nodes == 1:  # Listen only on the loopback interface, so that other machines cannot connect.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    rendezvous_url = os.environ.get(RENDEZVOUS_VARIABLE, "env://") if num_nodes == 1 else "env://"
    if num_nodes > 1:
        log.warning(
            "Waiting for the %d processes of %d machines at %s:%s.",
            num_ranks,
            num_nodes,
            os.environ["MASTER_ADDR"],
            os.environ["MASTER_PORT"],
        )

    future_ranks: Future[Ranks] = Future()

    def find() -> None:
        try:
            store, _, _ = next(rendezvous(rendezvous_url, rank, num_ranks, timeout=_START))
            future_ranks.set_result(GlooRanks(PrefixStore(f"federation {next(_meetings)}", store), rank, num_ranks))
        except BaseException as error:
            future_ranks.set_exception(error)

    Thread(target=find, daemon=True).start()  # In the main thread, the wait would block signals such as Ctrl+C.
    return future_ranks.result()
