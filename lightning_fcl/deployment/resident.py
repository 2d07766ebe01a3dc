"""A process that stays beside a SuperNode: it has imported all that a client needs, and forks for each message.

Flower starts a client process anew for every message, which then imports torch and Lightning anew. This one runs
Flower's own ``flower-superexec``, whose arguments it takes, and lets it fork where that would start a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lightning_fcl.deployment.messages import FOR
from lightning_fcl.errors import require


def warm() -> None:
    """Import what a client needs."""
    for name in ("flwr.app", "flwr.clientapp", "lightning_fcl.deployment.flower"):
        import_module(name)


def stay(words: Sequence[str]) -> None:
    """Run ``flower-superexec`` with these arguments, until it is told to stop."""
    warm()
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    executor: Any = require("flwr.supercore.superexec.executor.subprocess_executor", *FOR)
    require("flwr.supernode.cli.flwr_clientapp", *FOR)
    executor.subprocess = _Forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who are done
    sys.argv = ["flower-superexec", *words]
    require("flwr.supercore.cli.flower_superexec", *FOR).flower_superexec()


class _Forks:
    """Stands in for `subprocess` where Flower starts a client."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(words: Sequence[str], **options: Any) -> object:  # noqa: N802  # Flower calls it so
        """Fork for a client; anything else is a process as ever."""
        if os.path.basename(words[0]) != "flwr-clientapp":
            return subprocess.Popen(words, **options)
        if child := os.fork():
            return child
        try:
            follow_parent()
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            sys.argv = list(words)
            require("flwr.supernode.cli.flwr_clientapp", *FOR).flwr_clientapp()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # nothing of the parent's is ended here, and nobody asks how it went


def follow_parent(patience: float = 10.0) -> None:
    """Let this process end after the one that started it, also where Flower waits for a SuperLink that is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(patience)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
