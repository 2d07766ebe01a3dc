"""System heterogeneity: how fast each client computes, sends and receives, for rehearsing a deployment."""

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
    """How fast one client is.

    Args:
        seconds_per_sample: Seconds of local training for each sample of each local epoch; None: not known.
        upload_bandwidth: Bytes per second up; None: sending takes no time.
        download_bandwidth: Bytes per second down; None: receiving takes no time.
        latency: Seconds of each round that depend on nothing: waking up, connecting.

    Raises:
        ValueError: If a number is negative, infinite or none, or a bandwidth is 0.

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
        """Seconds from the beginning of the download to the end of the upload; samples count as often as they train."""
        download_seconds = download_bytes / self.download_bandwidth if self.download_bandwidth else 0.0
        upload_seconds = upload_bytes / self.upload_bandwidth if self.upload_bandwidth else 0.0
        return self.latency + download_seconds + samples * (self.seconds_per_sample or 0.0) + upload_seconds

    def scale(self, compute: float, link: float) -> Speed:
        """A client that takes so many times as long to compute, and to send and receive."""
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
    """The speeds of a federation's clients: typical ones, how far clients differ, and numbers of their own.

    A client without numbers of its own takes the typical ones times two factors that it keeps for good, for training
    and for its link. All that is random depends on the federation's seed, the client's name and the round alone.

    Args:
        seconds_per_sample: Seconds of local training of the typical client for each sample of each local epoch; None:
            every client has a number of its own.
        upload_bandwidth: Its bytes per second up; None: sending takes no time.
        download_bandwidth: Its bytes per second down; None: receiving takes no time.
        latency: Its seconds of each round that depend on nothing: waking up, connecting.
        spread: How far clients differ: the standard deviation of the logarithm of their factors, of median 1. With
            0.5, one client in six takes more than 1.65 times the typical time.
        variation: The same of a factor of the whole time that is drawn anew for each client and round.
        per_client: Numbers of clients' own, by name: what is not given is typical. They take no part in ``spread``.
        path: A YAML file of the same, or a CSV file with a column ``client`` and columns named as the arguments; an
            empty cell is typical. ``per_client`` goes over it.

    Raises:
        ValueError: If a number is out of range, or a name in ``per_client`` or the file is none of the arguments'.
        FileNotFoundError: If there is no such file.

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
        """The clients with numbers of their own: each should be one of the stream's."""
        return [*self.per_client]

    def check_clients(self, clients: tuple[str, ...]) -> None:
        """Refuse speeds that do not say how long a client trains."""
        missing = [client for client in clients if self._speeds.get(client, self.typical).seconds_per_sample is None]
        if missing:
            raise MissingValueError(
                f"Expected `seconds_per_sample` of every client but got none of {format_names(missing, 3)}.",
                hint="Set it in `ClientSpeeds` for all that have no number of their own.",
                argument="seconds_per_sample",
            )

    def for_client(self, client: str, seed: int) -> Speed:
        """How fast a client is."""
        if client in self._speeds or not self.spread:
            return self._speeds.get(client, self.typical)
        compute, link = (_factor(self.spread, seed, "speed", part, client) for part in ("compute", "link"))
        return self.typical.scale(compute, link)

    def seconds(
        self, client: str, round_idx: int, seed: int, samples: int, download_bytes: float, upload_bytes: float
    ) -> float:
        """Seconds of a client's round, with the variation that its seed draws. See `Speed.seconds`."""
        whole = self.for_client(client, seed).seconds(samples, download_bytes, upload_bytes)
        return whole * _factor(self.variation, seed, "speed", "round", client, round_idx) if self.variation else whole

    def fingerprint(self) -> dict[str, Any]:
        """The numbers, for checkpoints; those of clients' own, which may be many, as their digest."""
        digest = (
            hashlib.sha256(json.dumps(self.per_client, sort_keys=True).encode()).hexdigest()[:16]
            if self.per_client
            else None
        )
        return {**vars(self.typical), "spread": self.spread, "variation": self.variation, "clients": digest}


def _factor(sigma: float, seed: int, *parts: str | int) -> float:
    """A log-normal number with median 1."""
    uniform = ((derive_seed(seed, *parts) >> 4) + 0.5) / 2**52  # exact, and neither 0 nor 1
    return math.exp(sigma * NormalDist().inv_cdf(uniform))


def _check_number(name: str, value: object, above_zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and above_zero):  # type: ignore[operator]
        comparison = "above" if above_zero else "at least"
        raise InvalidValueError(
            f"Expected `{name}` to be a finite number {comparison} 0 but got {value}.", argument=name, value=value
        )


def _checked(client: str, speed_values: Any) -> dict[str, float]:
    try:
        numbers = {str(name): float(value) for name, value in speed_values.items()}
        Speed(**numbers)
        return numbers
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected the speed of client {client} to name {', '.join(_FIELDS)}, each with a number, but got "
            f"{speed_values!r:.100}: {error}",
            argument=client,
            value=speed_values,
        ) from error


_AGAIN = "Save the file as CSV, in UTF-8."


def _read(path: Path) -> dict[str, Any]:
    """The clients' own numbers of a file, as they stand there."""
    if path.suffix != ".csv":
        content = read_yaml(path)
        if not isinstance(content, Mapping):
            raise InvalidValueError(
                f"Expected {path} to map clients to their speeds but got {content!r:.100}.", value=path
            )
        return {str(client): own for client, own in content.items()}
    try:
        rows = list(csv.DictReader(read_lines(path, _AGAIN)))
    except csv.Error as error:
        raise InvalidValueError(f"Expected {path} to be CSV but got: {error}.", hint=_AGAIN) from error
    if any(None in row or _CLIENT not in row for row in rows):  # where `csv` puts what is too much
        raise InvalidValueError(
            f"Expected a column `{_CLIENT}`, and no more cells than columns, in {path}.",
            hint=f"Give the file a header with `{_CLIENT}`, and each row one cell for each column.",
            argument=_CLIENT,
            value=path,
        )
    clients = [row.pop(_CLIENT) for row in rows]
    if twice := [client for client, times in Counter(clients).items() if times > 1]:
        raise InvalidValueError(
            f"Expected each client once in {path} but {twice[0]} comes twice.",
            hint="Remove one of the rows.",
            argument=_CLIENT,
            value=twice[0],
        )
    return {
        client: {name: text for name, text in row.items() if text} for client, row in zip(clients, rows, strict=True)
    }
