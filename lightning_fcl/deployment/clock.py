"""Comparison of a node's clock with the SuperLink's clock.

A SuperNode signs the time of each request. The SuperLink rejects a request if this time differs too much from the
SuperLink's clock. The SuperNode then only logs that the connection failed.
"""

from __future__ import annotations

import ssl
import time
from contextlib import closing
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from lightning_fcl.errors import ConnectionFailedError, InvalidStateError, InvalidValueError

AHEAD, BEHIND = 5.0, 300.0
"""Limits in seconds: a node's clock may be at most `AHEAD` ahead of the SuperLink's clock, or `BEHIND` behind."""

# Maximum error of the measured difference in seconds. The date in the SuperLink's response has whole seconds.
_PRECISION = 1.5
# Seconds until a request to the SuperLink fails.
_TIMEOUT = 10.0


def check_clock(address: str | None, certificates: Path | None = None, insecure: bool = False) -> float:
    """Return the number of seconds by which the clock of this machine is ahead of the SuperLink's clock.

    Args:
        address: Address of the SuperLink, ``host:port``.
        certificates: File of the certificates to trust. Default: the certificates of the system.
        insecure: Whether to connect without TLS.

    Raises:
        ConnectionFailedError: If no SuperLink answers at the address.
        InvalidStateError: If the difference is so large that the SuperLink can reject requests of this machine.
        InvalidValueError: If the address has no host or no port.
    """
    offset = _measure(address, certificates, insecure)
    if not _PRECISION - BEHIND <= offset <= AHEAD - _PRECISION:
        side = "ahead" if offset > 0 else "behind"
        raise InvalidStateError(
            f"Expected the clock of this machine to be at most {AHEAD - _PRECISION:g} s ahead of the SuperLink's clock "
            f"and at most {BEHIND - _PRECISION:g} s behind, but this machine's clock is about {abs(offset):.0f} s "
            f"{side}. The SuperLink can reject the requests of this machine.",
            hint="Synchronize the clocks of both machines, for example with `timedatectl set-ntp true`.",
        )
    return offset


def _measure(address: str | None, certificates: Path | None, insecure: bool) -> float:
    """Return the number of seconds by which this machine's clock is ahead of the date in the SuperLink's response."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidValueError(
            f"Expected `--superlink` to be the address of a SuperLink, but got {address}.",
            hint="Give the address as `host:port`, for example --superlink 127.0.0.1:18000.",
            argument="superlink",
        )
    # An IPv6 address has brackets around the host. `HTTPConnection` expects the host without brackets.
    name = host.strip("[]")
    try:
        if insecure:
            connection = HTTPConnection(name, int(port), timeout=_TIMEOUT)
        else:
            context = ssl.create_default_context(cafile=certificates)
            connection = HTTPSConnection(name, int(port), timeout=_TIMEOUT, context=context)
        with closing(connection):
            start_time = time.time()
            connection.request("GET", "/")
            date = connection.getresponse().headers["Date"]
            current_time = (start_time + time.time()) / 2
    except (OSError, HTTPException) as error:
        raise ConnectionFailedError(
            f"Expected a SuperLink at {address}, but the connection failed ({error}).",
            hint="Start the SuperLink, or correct `--superlink`, `--insecure` and `--root-certificates`.",
        ) from error
    try:
        return current_time - (parsedate_to_datetime(date).timestamp() + 0.5)
    except (TypeError, ValueError) as error:
        raise ConnectionFailedError(
            f"Expected a SuperLink at {address}, but the response has no valid date.", hint="Correct `--superlink`."
        ) from error
