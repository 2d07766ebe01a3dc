"""The privacy ledger: a file with one line per release, which is written before the release.

The file is append-only. A release that is repeated with the same settings in the same round has the same bits, and is
charged once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_fcl.errors import DamagedFileError, InvalidStateError
from lightning_fcl.io.atomic import append
from lightning_fcl.io.reading import read_bytes
from lightning_fcl.privacy.accounting import Release

LEDGER = "privacy-ledger.jsonl"
"""Name of the ledger's file in the folder of a run."""


@dataclass(frozen=True)
class Charge:
    """An entry of the ledger: a release of a round.

    Args:
        round: Index of the round, from 0.
        settings: Hash of all settings that define the bits of the release.
        noise_multiplier: See `Release`.
        sampling_prob: See `Release`.
        unit: The unit whose data is protected.
        max_uses: Maximum number of releases of the run that can contain data of the same unit.
    """

    round: int
    settings: str
    noise_multiplier: float
    sampling_prob: float
    unit: str
    max_uses: int

    @property
    def release(self) -> Release:
        """The release."""
        return Release(self.noise_multiplier, self.sampling_prob)


class PrivacyLedger:
    """The charges of all releases so far.

    Args:
        path: Path of the file. None: the ledger exists only in memory.
        is_writer: Whether to write new charges to the file.

    Raises:
        DamagedFileError: If the file is not a ledger. A last line without an end is ignored, because it belongs to a
            release that did not happen.

    Example:
        >>> ledger, charge = PrivacyLedger(), Charge(0, "a", 1.5, 1.0, unit="client", max_uses=10)
        >>> ledger.charge(charge), ledger.charge(charge), len(ledger)
        (True, False, 1)
    """

    def __init__(self, path: Path | None = None, is_writer: bool = True) -> None:
        self.path, self._is_writer = path, is_writer
        self.charges: dict[Charge, None] = {}
        self._size = 0
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self.charges)

    def counts(self, other_than: str | None = None) -> Counter[Release]:
        """Return the number of releases of each kind that can contain data of the same unit.

        Releases with the settings ``other_than`` are left out.
        """
        counts: Counter[Release] = Counter()
        by_run: dict[str, list[Charge]] = {}
        for charge in self.charges:
            by_run.setdefault(charge.settings, []).append(charge)
        for settings, charges in by_run.items():
            if settings != other_than:  # All releases of a run have the same noise.
                counts[charges[0].release] += min(len(charges), charges[0].max_uses)
        return counts

    def num_charges(self, settings: str) -> int:
        """Return the number of charges of the run with the given hash of the settings."""
        return sum(charge.settings == settings for charge in self.charges)

    @property
    def units(self) -> set[str]:
        """The units of all charges."""
        return {charge.unit for charge in self.charges}

    def charge(self, charge: Charge) -> bool:
        """Add a charge. If the ledger has a file, the charge is on the disk when the function returns.

        Returns:
            Whether the charge is new. A charge that the ledger contains is not added again.
        """
        if charge in self.charges:
            return False
        if self.path is not None and self._is_writer:
            line = (json.dumps(asdict(charge)) + "\n").encode()
            append(self.path, self._size, line)
            self._size += len(line)
        self.charges[charge] = None
        return True

    def check_contains(self, num_charges: int, settings: str) -> None:
        """Check that the ledger contains the charges of a checkpoint.

        Args:
            num_charges: Number of charges with these settings when the checkpoint was saved.
            settings: Hash of the settings.

        Raises:
            InvalidStateError: If the ledger has fewer charges.
        """
        if (num_found := self.num_charges(settings)) < num_charges:
            raise InvalidStateError(
                f"Expected a privacy ledger with at least {num_charges} releases of this run, as in the checkpoint, "
                f"but {self.path} contains {num_found}.",
                hint="Restore the file from a backup, or start without `ckpt_path`.",
                argument="ledger",
                value=self.path,
            )

    def _read(self, path: Path) -> None:
        lines = read_bytes(path).split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            self.charges[_parse(line, path, number)] = None
            self._size += len(line) + 1


def _parse(line: bytes, path: Path, number: int) -> Charge:
    try:
        charge = Charge(**json.loads(line))
        numbers = (charge.round, charge.max_uses)
        sound = all(type(number) is int and number >= 0 for number in numbers)
        if not (sound and {type(charge.settings), type(charge.unit)} == {str}):
            raise ValueError("unknown values")
        if not math.isfinite(charge.release.noise_multiplier):
            raise ValueError("no noise")
    except (ValueError, TypeError) as error:
        raise DamagedFileError(
            f"Expected line {number} of the privacy ledger {path} to be a release, but got {line[:100]!r}.",
            hint="Restore the file from a backup. Without the ledger, the privacy budget is unknown.",
            value=path,
        ) from error
    return charge
