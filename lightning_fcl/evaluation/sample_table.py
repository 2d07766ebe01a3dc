"""Correctness of the predictions of single test samples for rows of a table, stored in ``samples.json``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.errors import DamagedFileError
from lightning_fcl.evaluation.sample_bits import decode_bits, encode_bits
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_json

SampleTable: TypeAlias = Mapping[str, Mapping[int, NDArray[np.bool_]]]
"""Whether the server predicts each test sample correctly at the end of a run, by row and seed."""

_FORMAT = 1
_HINT = "Write the file with `lightning-fcl leaderboard`."


def collect_samples(
    results: Iterable[Mapping[str, Any]], rows: Collection[str]
) -> dict[str, dict[int, NDArray[np.bool_]]]:
    """Return the correctness of the predictions on each test sample. Runs without this part of the record are left out.

    Args:
        results: Contents of ``results.json`` of runs.
        rows: Rows to collect.
    """
    samples: dict[str, dict[int, NDArray[np.bool_]]] = {}
    for result in results:
        record, row = result["record"], result["recipe"]["row"]
        text = record["rounds"][-1].get("correct_samples", {}).get("server") if record["rounds"] else None
        if row in rows and text is not None:
            samples.setdefault(row, {})[result["seed"]] = decode_bits(text, sum(record["totals"]))
    return samples


def write_samples(path: Path, samples: SampleTable) -> Path:
    """Write ``samples.json``, and return its path."""
    rows = {
        row: {str(seed): {"n": len(bits), "bits": encode_bits(bits)} for seed, bits in sorted(bits_by_seed.items())}
        for row, bits_by_seed in samples.items()
    }
    return write_atomic(path, json.dumps({"format": _FORMAT, "rows": rows}, indent=1) + "\n")


def read_samples(path: Path) -> dict[str, dict[int, NDArray[np.bool_]]]:
    """Return the content of a ``samples.json``.

    Raises:
        DamagedFileError: If the file has another content.
        MissingFileError: If there is no such file.
    """
    content = read_json(path, "the test samples of a table in ", _FORMAT, _HINT)
    try:
        return {
            row: {int(seed): decode_bits(entry["bits"], int(entry["n"])) for seed, entry in entries.items()}
            for row, entries in content["rows"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"Expected {path} to contain test samples, but reading it failed: {error!r}.", hint=_HINT, value=path
        ) from error
