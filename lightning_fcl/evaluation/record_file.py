"""``record.jsonl`` of a run's folder: what was measured, a line a round, so that no checkpoint has to hold it all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.files import append

NAME = "record.jsonl"


class RecordFile:
    """A record in a file that grows: a round's cost does not depend on the rounds before.

    A line is a round, or what else the record tells, whenever that changes. A checkpoint holds how long the file was
    when it was written, and a SHA-256 of its lines: what comes after them is of rounds that are trained again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self._rest: dict[str, Any] = {}  # what the file tells beside the rounds
        self._number, self._last = 0, dict[str, Any]()  # of the rounds that it tells
        self._size, self._digest = 0, ""

    def extend(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write what the file does not tell yet.

        Returns:
            What a checkpoint is to hold in place of the record.
        """
        rest, rounds = {name: value for name, value in record.items() if name != "rounds"}, record["rounds"]
        if self._number and (len(rounds) < self._number or rounds[self._number - 1] != self._last):
            self._begin()  # another fit's
        lines = [] if rest == self._rest else [{"rest": rest}]
        for entry in rounds[self._number :]:
            same = entry["experience"] is self._last.get("experience")  # of many clients, written once
            lines.append({name: value for name, value in entry.items() if not (same and name == "experience")})
            self._last = entry
        data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        append(self.path, self._size, data)
        self._take(data)
        self._rest, self._number = rest, len(rounds)
        return {"bytes": self._size, "sha256": self._digest}

    def _take(self, data: bytes) -> None:
        """Add lines to the size and the digest, which goes on from line to line: one half-way could not be copied."""
        self._size += len(data)
        for line in data.splitlines():
            self._digest = hashlib.sha256(self._digest.encode() + line).hexdigest()

    def read(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The record as it was when a checkpoint was written."""
        self._begin()
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size >= told["bytes"]:
            with self.path.open("rb") as file:
                data = file.read(told["bytes"])
            self._take(data)
        if size < told["bytes"] or self._digest != told["sha256"]:
            raise ValueError(
                f"{self.path}, which tells what was measured until then, is missing or another run's. Bring it here "
                "from the folder of the checkpoint's run"
            )
        rounds: list[dict[str, Any]] = []
        for line in map(json.loads, data.splitlines()):
            if "rest" in line:
                self._rest = line["rest"]
            else:
                self._last = {"experience": self._last.get("experience"), **line}
                rounds.append(self._last)
        self._number = len(rounds)
        return {**self._rest, "rounds": rounds}
