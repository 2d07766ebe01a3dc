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
from typing import Any

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
    """

    round: int
    settings: str
    noise_multiplier: float
    sampling_prob: float

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
        >>> ledger = PrivacyLedger()
        >>> ledger.charge(Charge(0, "a", 1.5, 1.0)), ledger.charge(Charge(0, "a", 1.5, 1.0)), len(ledger)
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
        """Return the number of releases of each kind. Releases with the settings ``other_than`` are left out."""
        return Counter(charge.release for charge in self.charges if charge.settings != other_than)

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
        """Check that the ledger contains the charges of a checkpoint. A ledger in memory gets these charges.

        Args:
            num_charges: Number of charges with these settings when the checkpoint was saved.
            settings: Hash of the settings.

        Raises:
            InvalidStateError: If the ledger has fewer charges.
        """
        num_found = sum(charge.settings == settings for charge in self.charges)
        if num_found < num_charges:
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
        content: Any = json.loads(line)
        charge = Charge(content["round"], content["settings"], content["noise_multiplier"], content["sampling_prob"])
        sound = type(charge.round) is int and isinstance(charge.settings, str) and len(content) == 4
        if not (sound and charge.round >= 0 and math.isfinite(charge.release.noise_multiplier)):
            raise ValueError("unknown values")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"Expected line {number} of the privacy ledger {path} to be a release, but got {line[:100]!r}.",
            hint="Restore the file from a backup. Without the ledger, the privacy budget is unknown.",
            value=path,
        ) from error
    return charge
