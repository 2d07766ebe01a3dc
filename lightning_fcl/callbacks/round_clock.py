"""Wall-clock time and processor time of rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fcl.federation.ranks import Ranks


class RoundClock:
    """Clock that measures the time of each round.

    The wall-clock time contains everything between the ends of two rounds. The processor time leaves out the tests of
    models, so that it is the cost of training and aggregation.

    Example:
        >>> clock = RoundClock()
        >>> clock.start()
        >>> with clock.testing():
        ...     _ = sum(range(1000))
        >>> from lightning_fcl.federation.ranks import SINGLE_RANK
        >>> sorted(clock.end_round(SINGLE_RANK))
        ['processor_seconds', 'seconds']
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the first round."""
        self._started, self._processor_started, self._test_seconds = time.monotonic(), time.process_time(), 0.0

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Leave the processor time of the block out of the round."""
        start = time.process_time()
        yield
        self._test_seconds += time.process_time() - start

    def end_round(self, ranks: Ranks) -> dict[str, float]:
        """Return the times of the round in seconds, and start the next round.

        ``seconds`` is the wall-clock time. ``processor_seconds`` is the processor time of all threads of all ranks.
        """
        seconds = time.monotonic() - self._started
        processor_seconds = time.process_time() - self._processor_started - self._test_seconds
        self.start()
        return {"seconds": seconds, "processor_seconds": sum(ranks.all_gather_object(processor_seconds))}
