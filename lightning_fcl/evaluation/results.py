"""The files of a finished run: ``results.json``, and the seal, which is written last and says that all are whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.files import sha256, write_whole
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.evaluation.record_file import NAME as RECORD
from lightning_fcl.evaluation.sums import read_sums, write_sums

FORMAT = 1
"""The format of ``results.json``."""

CONFIG, LAST = "config.yaml", Path("checkpoints", "last.ckpt")
"""Where the recipe of a run lies in its folder, and the checkpoint of its last round."""

_SEAL = "files.txt"
_WRITTEN = (LAST, RECORD, _SEAL, "results.json", "metrics.csv", "report.html")
_KEYS = ("recipe", "seed", "metrics", "record", "expected", "versions", "machine", "seconds", "command", "finished")


def write_results(folder: str | Path, results: Mapping[str, Any], indent: int | None = 1) -> Path:
    """Write ``results.json`` of a run's folder, with its format and a checksum."""
    content = {"format": FORMAT, **results}
    text = json.dumps({**content, "checksum": _checksum(json.loads(json.dumps(content)))}, indent=indent)
    return write_whole(Path(folder) / "results.json", text)


def read_results(folder: str | Path) -> dict[str, Any]:
    """Read and check ``results.json`` of a run's folder."""
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected the run's results in {path} but found no such file. Name the folder of a finished run."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected {path} to hold JSON but got: {error}. Repeat the run.") from error
    results = content if isinstance(content, dict) else {}
    form, checksum = results.get("format"), results.pop("checksum", None)
    if form != FORMAT:
        raise ValueError(
            f"Expected {path} to be of format {FORMAT} but it is of {'none' if form is None else form}: it is damaged, "
            "or another version of lightning-fcl wrote it. Repeat the run, or read it with the version that wrote it."
        )
    if checksum != _checksum(results):
        raise ValueError(f"Expected {path} to be as it was written but its checksum is another. Repeat the run.")
    missing = [key for key in _KEYS if key not in results]
    if missing:
        raise ValueError(f"Expected {path} to have the entries {', '.join(missing)} but they are missing.")
    return results


def seal(folder: Path, files: Iterable[Path]) -> Path:
    """Say that a run is finished, and what its files hold: the last that is written."""
    return write_sums(folder / _SEAL, {path.relative_to(folder).as_posix(): sha256(path) for path in files})


def is_whole(folder: Path) -> bool:
    """Whether a run is finished: its seal is there and understood, and each file as the seal says."""
    try:
        digests = read_sums(folder / _SEAL)
        same = all(sha256(inside(folder, name)) == digest for name, digest in digests.items())
    except (OSError, ValueError):
        return False
    return same and "results.json" in digests


def run_of(config: Path) -> Path | None:
    """The folder of the run whose recipe a file is; None: it is none's."""
    folder = config.parent
    begun = (folder / "results.json").is_file() or any(folder.glob("checkpoints/*.ckpt"))
    return folder if config.name == CONFIG and begun else None


def start_over(folder: Path) -> None:
    """Remove what an earlier run has left in a folder: nothing of it is to be told as another's."""
    for name in _WRITTEN:
        (folder / name).unlink(missing_ok=True)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
