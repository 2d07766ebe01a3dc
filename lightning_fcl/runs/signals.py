"""Ctrl-C, SIGTERM and SIGHUP: what a command does when it is told to stop.

At once, unless something is to be brought to an end first; asked twice, at once in any case. Nothing half-written and
no process of its own stays behind. No exception is thrown into what runs: between two lines of somebody else's code it
might be swallowed, or become another one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from types import FrameType
from typing import NoReturn

from lightning_fcl.io.atomic import remove_temporary

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_PATIENCE = 5.0  # seconds that child processes have to end


class Stopped(SystemExit):
    """A command that was told to stop has brought to an end what it wanted to."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.number = number
        self.message = message


class SignalHandler:
    """Listens to the signals by which a command is told to stop.

    Attributes:
        signal: The first signal that came, while something was to be brought to an end; 0: none.
        how_to_go_on: Tells what is finished and how to go on, where a command stops at once.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.how_to_go_on: Callable[[], str] = str
        self._finish: Callable[[], str] | None = None
        self._process = 0  # the one that listens

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen until the end of the block; signals that are ignored stay so, and a thread hears none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        hook = threading.excepthook
        self._process, self.signal = os.getpid(), 0
        self.install()
        shorten_thread_errors()
        try:
            yield
        finally:
            self._process = 0
            self.how_to_go_on = str
            threading.excepthook = hook
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals back from who has taken them meanwhile, as Lightning does; nothing where none are heard."""
        for number in _SIGNALS if self._process else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._heard)

    @contextmanager
    def defer_stop(self, num_rounds: Callable[[], str]) -> Iterator[None]:
        """Until the end of the block, the first signal is only noted."""
        previous_finish, self._finish = self._finish, num_rounds
        try:
            yield
        finally:
            self._finish = previous_finish

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked one has its parent's handlers; at Ctrl-C its parent decides
            if number != signal.SIGINT:
                os._exit(128 + number)
            return
        if self._finish is None or self.signal:
            exit_now(number, f"stopped. {self.how_to_go_on()}")
        self.signal = number
        write_stderr(f"{self._finish()} Once more: at once.")


def exit_now(number: int, message: str = "") -> NoReturn:
    """End this process and its children at once; of temporary files nothing stays."""
    if message:
        write_stderr(message)
    children = active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(_PATIENCE)
        child.kill()
    remove_temporary()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be in the midst of a write
            stream.flush()
    os._exit(128 + number)


def write_stderr(message: str) -> None:
    """A line on stderr, past its buffer: a signal may have come in the midst of a write to that."""
    with suppress(OSError):
        os.write(2, f"\nlightning-fcl: {message.strip()}\n".encode())


def shorten_thread_errors() -> None:
    """Let a thread that cannot write, as TensorBoard's on a full disk, say so in one line."""

    def failed(hook_arguments: threading.ExceptHookArgs) -> None:
        if isinstance(hook_arguments.exc_value, OSError):
            write_stderr(f"error: {hook_arguments.exc_value}")
        else:
            threading.__excepthook__(hook_arguments)

    threading.excepthook = failed


def end_worker_with_parent() -> None:
    """In a worker: end as soon as the parent process ends, whatever ends it, or at SIGTERM.

    A thread waits for both, since Python's own handlers wait until the call that the main thread is in comes back.
    """
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    parent = parent_process()
    assert parent is not None
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)

    def watch() -> None:
        while parent.sentinel not in wait([parent.sentinel, read_fd]) and signal.SIGTERM not in os.read(read_fd, 64):
            pass  # some other signal
        exit_now(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


stop = SignalHandler()
"""That of this process: signals are the process's."""
