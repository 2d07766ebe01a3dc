"""System heterogeneity: the speed at which each client computes, uploads and downloads, for the simulated clock."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from lightning_fcl.data.datasets.readers import read_lines
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import check_arguments, format_names

__all__ = ["ClientSpeeds", "Speed"]

_CLIENT = "client"


@dataclass(frozen=True)
class Speed:
    """The speed of one client.

    Args:
        seconds_per_sample: Seconds of local training for each sample of each local epoch. None: unknown.
        upload_bandwidth: Upload bandwidth in bytes per second. None: uploads take no time.
        download_bandwidth: Download bandwidth in bytes per second. None: downloads take no time.
        latency: Fixed time in seconds that is added to each round, for example for waking up and connecting.

    Raises:
        ValueError: If a number is negative or non-finite, or a bandwidth is 0.

    Example:
        >>> Speed(0.01, upload_bandwidth=1000, download_bandwidth=4000, latency=2).seconds(100, 4000, 4000)
        8.0
    """

    seconds_per_sample: float | None = None
    upload_bandwidth: float | None = None
    download_bandwidth: float | None = None
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                _check_number(name, value, above_zero=name.endswith("bandwidth"))

    def seconds(self, samples: int, download_bytes: float, upload_bytes: float) -> float:
        """Return the seconds from the start of the download to the end of the upload.

        Args:
            samples: Number of training samples, each counted once per local epoch.
            download_bytes: Size of the download in bytes.
            upload_bytes: Size of the upload in bytes.
        """
        download_seconds = download_bytes / self.download_bandwidth if self.download_bandwidth else 0.0
        upload_seconds = upload_bytes / self.upload_bandwidth if self.upload_bandwidth else 0.0
        return self.latency + download_seconds + samples * (self.seconds_per_sample or 0.0) + upload_seconds

    def scale(self, compute: float, link: float) -> Speed:
        """Return a copy whose training and transfer times are multiplied by factors. The latency stays the same.

        Args:
            compute: Factor of the training time.
            link: Factor of the download and upload times.
        """
        upload_bandwidth, download_bandwidth = (
            None if b is None else b / link for b in (self.upload_bandwidth, self.download_bandwidth)
        )
        seconds_per_sample = self.seconds_per_sample
        return Speed(
            None if seconds_per_sample is None else seconds_per_sample * compute,
            upload_bandwidth,
            download_bandwidth,
            self.latency,
        )


_FIELDS = tuple(field.name for field in fields(Speed))


class ClientSpeeds:
    """The speeds of a federation's clients: typical values, random differences, and explicit values for some clients.

    If a client has no explicit values, its training time is the typical time multiplied by a random factor. Its
    transfer times are multiplied by a second random factor. Both factors stay the same in all rounds. All random
    numbers depend only on the federation's seed, the client's name and the round.

    Args:
        seconds_per_sample: Seconds of local training of the typical client for each sample of each local epoch. None:
            every client needs an explicit value.
        upload_bandwidth: Typical upload bandwidth in bytes per second. None: uploads take no time.
        download_bandwidth: Typical download bandwidth in bytes per second. None: downloads take no time.
        latency: Typical fixed time in seconds that is added to each round, for example for waking up and connecting.
        spread: Standard deviation of the logarithm of both random factors. Their median is 1. With 0.5, each factor is
            above 1.65 for about one client in six.
        variation: Standard deviation of the logarithm of a third random factor with median 1. This factor multiplies
            the total time of a round, and is drawn for each client and round.
        per_client: Explicit values, by client name and argument name. A missing value is the typical value. ``spread``
            does not change the values of these clients.
        path: YAML file with values in the format of ``per_client``, or CSV file with a column ``client`` and columns
            named like the arguments of `Speed`. An empty cell means the typical value. ``per_client`` overrides the
            file.

    Raises:
        ValueError: If a number is out of range, or a name in ``per_client`` or in the file is not an argument of
            `Speed`.

    Example:
        >>> speeds = ClientSpeeds(0.01, latency=1, per_client={"client1": {"seconds_per_sample": 0.1}})
        >>> [speeds.for_client(client, seed=0).seconds_per_sample for client in ("client1", "client2")]
        [0.1, 0.01]
        >>> round(speeds.seconds("client2", 0, seed=0, samples=50, download_bytes=0, upload_bytes=0), 2)
        1.5
    """

    @check_arguments
    def __init__(
        self,
        seconds_per_sample: float | None = None,
        upload_bandwidth: float | None = None,
        download_bandwidth: float | None = None,
        latency: float = 0.0,
        spread: float = 0.0,
        variation: float = 0.0,
        per_client: dict[str, dict[str, float]] | None = None,
        path: str | None = None,
    ) -> None:
        self.typical = Speed(seconds_per_sample, upload_bandwidth, download_bandwidth, latency)
        for name, value in (("spread", spread), ("variation", variation)):
            _check_number(name, value)
        self.spread = spread
        self.variation = variation
        client_speeds = {str(client): own for client, own in (per_client or {}).items()}
        file_speeds = _read(Path(path)) if path is not None else {}
        self.per_client = {
            client: {**_checked(client, file_speeds.get(client, {})), **_checked(client, client_speeds.get(client, {}))}
            for client in {**file_speeds, **client_speeds}
        }
        self._speeds = {client: replace(self.typical, **own) for client, own in self.per_client.items()}

    @property
    def explicit_clients(self) -> list[str]:
        """Names of the clients with explicit values. Each name must be a client of the stream."""
        return [*self.per_client]

    def check_clients(self, clients: tuple[str, ...]) -> None:
        """Raise MissingValueError if ``seconds_per_sample`` is unknown for a client."""
        missing = [client for client in clients if self._speeds.get(client, self.typical).seconds_per_sample is None]
        if missing:
            raise MissingValueError(
                f"Expected `seconds_per_sample` of every client, but it is missing for {format_names(missing, 3)}.",
                hint="Set `seconds_per_sample` in `ClientSpeeds`. It applies to all clients without an explicit value.",
                argument="seconds_per_sample",
            )

    def for_client(self, client: str, seed: int) -> Speed:
        """Return the speed of a client, with the random factors of ``spread`` but not the factor of ``variation``."""
        if client in self._speeds or not self.spread:
            return self._speeds.get(client, self.typical)
        compute, link = (_factor(self.spread, seed, "speed", part, client) for part in ("compute", "link"))
        return self.typical.scale(compute, link)

    def seconds(
        self, client: str, round_idx: int, seed: int, samples: int, download_bytes: float, upload_bytes: float
    ) -> float:
        """Return the duration of a client's round in seconds, including the random variation. See `Speed.seconds`."""
        whole = self.for_client(client, seed).seconds(samples, download_bytes, upload_bytes)
        return whole * _factor(self.variation, seed, "speed", "round", client, round_idx) if self.variation else whole

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that a checkpoint must match to be resumed. Explicit values are included as one hash."""
        digest = (
            hashlib.sha256(json.dumps(self.per_client, sort_keys=True).encode()).hexdigest()[:16]
            if self.per_client
            else None
        )
        return {**vars(self.typical), "spread": self.spread, "variation": self.variation, "clients": digest}


def _factor(sigma: float, seed: int, *parts: str | int) -> float:
    """Return a random number with a log-normal distribution and median 1."""
    # The uniform number is exact and strictly between 0 and 1.
    uniform = ((derive_seed(seed, *parts) >> 4) + 0.5) / 2**52
    return math.exp(sigma * NormalDist().inv_cdf(uniform))


def _check_number(name: str, value: object, above_zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and above_zero):  # type: ignore[operator]
        comparison = "above" if above_zero else "of at least"
        raise InvalidValueError(
            f"Expected `{name}` to be a finite number {comparison} 0, but got {value}.", argument=name, value=value
        )


def _checked(client: str, speed_values: Any) -> dict[str, float]:
    try:
        numbers = {str(name): float(value) for name, value in speed_values.items()}
        Speed(**numbers)
        return numbers
    except (AttributeError, TypeError, ValueError) as error:
        # Other errors name internal functions. They mean that the value is not a dict, or that a key is unknown.
        reason = f": {str(error).rstrip('.')}" if isinstance(error, ValueError) else ""
        raise InvalidValueError(
            f"Expected the speed of client {client} to be a dict of numbers with some of the keys "
            f"{', '.join(_FIELDS)}, but got {speed_values!r:.100}{reason}.",
            argument=client,
            value=speed_values,
        ) from error


_AGAIN = "Save the file as CSV in UTF-8, and pass its path."


def _read(path: Path) -> dict[str, Any]:
    """Return the explicit values of clients from a file, by client name, without checking the values."""
    if path.suffix != ".csv":
        content = read_yaml(path)
        if not isinstance(content, Mapping):
            raise InvalidValueError(
                f"Expected {path} to map clients to their speeds, but got {content!r:.100}.", value=path
            )
        return {str(client): own for client, own in content.items()}
    try:
        rows = list(csv.DictReader(read_lines(path, _AGAIN)))
    except csv.Error as error:
        raise InvalidValueError(
            f"Expected {path} to be a CSV file, but reading it failed: {error}.", hint=_AGAIN
        ) from error
    # `csv` stores extra cells of a row under the key None.
    if any(None in row or _CLIENT not in row for row in rows):
        raise InvalidValueError(
            f"Expected each row of {path} to have a column `{_CLIENT}`, and no more cells than columns, but at least "
            "one row does not.",
            hint=f"Add a header with the column `{_CLIENT}`, and give each row one cell per column.",
            argument=_CLIENT,
            value=path,
        )
    clients = [row.pop(_CLIENT) for row in rows]
    if twice := [client for client, times in Counter(clients).items() if times > 1]:
        raise InvalidValueError(
            f"Expected each client once in {path}, but {twice[0]} appears more than once.",
            hint="Remove the duplicate rows.",
            argument=_CLIENT,
            value=twice[0],
        )
    return {
        client: {name: text for name, text in row.items() if text} for client, row in zip(clients, rows, strict=True)
    }
