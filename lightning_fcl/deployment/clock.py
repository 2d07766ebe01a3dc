"""Comparison of the clock of a node's machine with the SuperLink's.

A SuperNode signs the time of each request. The SuperLink rejects a request from the future, and the SuperNode only logs
that the connection failed.
"""

from __future__ import annotations

import ssl
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from lightning_fcl.errors import ConnectionFailedError, InvalidStateError, InvalidValueError

AHEAD, BEHIND = 5.0, 300.0
"""Seconds by which Flower lets the clock of a node be ahead of the SuperLink's, and behind it."""

_PRECISION = 1.5  # seconds: the SuperLink reports whole seconds, and renews them once a second
_TIMEOUT = 10.0  # seconds


def check_clock(address: str | None, certificates: Path | None = None, insecure: bool = False) -> float:
    """Return how many seconds the clock of this machine is ahead of the SuperLink's.

    Args:
        address: Address of the SuperLink, ``host:port``.
        certificates: File of the certificates to trust. Default: those of the system.
        insecure: Whether to connect without TLS.

    Raises:
        InvalidStateError: If the difference is so large that the SuperLink can reject requests of this machine.
    """
    offset = _measure(address, certificates, insecure)
    if not _PRECISION - BEHIND <= offset <= AHEAD - _PRECISION:
        side = "ahead of" if offset > 0 else "behind"
        raise InvalidStateError(
            f"Expected the clock of this machine to be less than {AHEAD:g} s ahead of the SuperLink's, and less than "
            f"{BEHIND:g} s behind it, but it is about {abs(offset):.0f} s {side} it. The SuperLink rejects such nodes.",
            hint="Synchronize the clocks of both machines, for example with `timedatectl set-ntp true`.",
        )
    return offset


def _measure(address: str | None, certificates: Path | None, insecure: bool) -> float:
    """Return the difference between the clocks, from the date of the SuperLink's HTTP responses."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidValueError(
            f"Expected `--superlink` to be the address of a SuperLink but got {address}.",
            hint="Give it as `host:port`, for example --superlink 127.0.0.1:18000.",
            argument="superlink",
        )
    name = host.strip("[]")  # of an IPv6 address
    try:
        if insecure:
            connection = HTTPConnection(name, int(port), timeout=_TIMEOUT)
        else:
            context = ssl.create_default_context(cafile=certificates)
            connection = HTTPSConnection(name, int(port), timeout=_TIMEOUT, context=context)
        start_time = time.time()
        connection.request("GET", "/")
        date = connection.getresponse().headers["Date"]
        current_time = (start_time + time.time()) / 2
    except (OSError, HTTPException) as error:
        raise ConnectionFailedError(
            f"Expected a SuperLink at {address} but the connection failed ({error}).",
            hint="Start the SuperLink, or correct `--superlink`, and `--insecure` or `--root-certificates`.",
        ) from error
    finally:
        connection.close()
    try:
        return current_time - (parsedate_to_datetime(date).timestamp() + 0.5)
    except (TypeError, ValueError) as error:  # another program than a SuperLink
        raise ConnectionFailedError(
            f"Expected a SuperLink at {address} but its response has no date.", hint="Correct `--superlink`."
        ) from error
