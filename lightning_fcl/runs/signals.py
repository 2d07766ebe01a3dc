"""Handling of Ctrl-C (SIGINT), SIGTERM and SIGHUP.

A signal ends the command at once, or at the next safe point if the command defers signals. A second signal always ends
the command at once. Temporary files are removed, and child processes are ended.

The handler raises no exception, because the running code could catch or replace it.
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
_PATIENCE = 5.0  # seconds until a child process that does not end is killed


class Stopped(SystemExit):
    """An exit of a command that received a signal and has stopped at a safe point."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.number = number
        self.message = message


class SignalHandler:
    """A handler of the signals that stop a command.

    Attributes:
        signal: Number of the first signal that was deferred. 0 if there was none.
        how_to_go_on: Function that returns the text to print if a signal stops the command at once. The text contains
            the number of finished runs and how to resume. By default, the text is empty.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.how_to_go_on: Callable[[], str] = str
        self._finish: Callable[[], str] | None = None
        self._process = 0  # ID of the process that installed the handlers

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Temporarily handle signals. Ignored signals stay ignored. Do nothing outside the main thread."""
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
        """Install the handlers again, because Lightning may have replaced them. Do nothing outside `installed`."""
        for number in _SIGNALS if self._process else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._heard)

    @contextmanager
    def defer_stop(self, num_rounds: Callable[[], str]) -> Iterator[None]:
        """Temporarily defer the first signal. The result of ``num_rounds`` is printed when this signal is received."""
        previous_finish, self._finish = self._finish, num_rounds
        try:
            yield
        finally:
            self._finish = previous_finish

    def _heard(self, number: int, frame: FrameType | None) -> None:
        # A forked process inherits the handlers. It ignores Ctrl-C, because its parent also receives the signal.
        if os.getpid() != self._process:
            if number != signal.SIGINT:
                os._exit(128 + number)
            return
        if self._finish is None or self.signal:
            exit_now(number, f"stopped. {self.how_to_go_on()}")
        self.signal = number
        write_stderr(f"{self._finish()} A second signal stops the command at once.")


def exit_now(number: int, message: str = "") -> NoReturn:
    """End this process and its children, and remove temporary files. Children that do not end within 5 s are killed."""
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
        with suppress(Exception):  # The signal may have interrupted a write to this stream.
            stream.flush()
    os._exit(128 + number)


def write_stderr(message: str) -> None:
    """Write a line directly to stderr. A signal may have interrupted a write to the buffer of stderr."""
    with suppress(OSError):
        os.write(2, f"\nlightning-fcl: {message.strip()}\n".encode())


def shorten_thread_errors() -> None:
    """Install a hook that prints an OSError in a thread as one line.

    For example, TensorBoard's writer raises an OSError if the disk is full.
    """

    def failed(hook_arguments: threading.ExceptHookArgs) -> None:
        if isinstance(hook_arguments.exc_value, OSError):
            write_stderr(f"error: {hook_arguments.exc_value}")
        else:
            threading.__excepthook__(hook_arguments)

    threading.excepthook = failed


def end_worker_with_parent() -> None:
    """Start a thread that ends this worker process when the parent process ends, or on SIGTERM.

    A signal handler would be too slow, because it runs only when the current call of the main thread returns.
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
            pass  # Ignore other signals.
        exit_now(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


stop = SignalHandler()
"""The signal handler of this process."""
