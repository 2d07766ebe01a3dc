"""Plugin that writes checkpoint files atomically and reads them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities import cloud_io

from lightning_fcl.evaluation.results import RecordFile
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import open_file


class AtomicCheckpointIO(TorchCheckpointIO):
    """Plugin that writes each checkpoint to a temporary file in the same folder, and then renames the file.

    Lightning writes a checkpoint to the system's temporary folder, and then moves the file. If the temporary folder is
    on another disk, the move is a copy. A killed process or a full disk then leaves an incomplete file. For remote
    paths, such as ``s3://...``, and if ``storage_options`` are given, this plugin calls Lightning's plugin.

    If ``run`` is given, a separate file in the run folder contains the record of rounds. A checkpoint in a direct
    subfolder of the run folder contains the size and the checksum of that file instead of the record.

    Args:
        run: The folder of the run. None: no run folder, so each checkpoint contains its record.
    """

    def __init__(self, run: Path | None = None) -> None:
        super().__init__()
        self._record = RecordFile(run.resolve()) if run is not None else None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = Path(path)
        if self._record is not None and file.resolve().parent.parent == self._record.path.parent:
            checkpoint = _with_records(checkpoint, "rounds", self._record.extend)
        content = io.BytesIO()
        torch.save(checkpoint, content)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content.getvalue())

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> Any:
        """Load a checkpoint. If the record of rounds is in a separate file, insert the record into the checkpoint."""
        if _is_remote(path):
            return super().load_checkpoint(path, *arguments, **options)
        with open_file(path) as checkpoint_file:
            checkpoint = cloud_io._load(checkpoint_file, *arguments, **options)
        file, run_record = RecordFile(Path(path).resolve().parents[1]), self._record
        return _with_records(
            checkpoint, "sha256", (run_record if run_record and run_record.path == file.path else file).read
        )


def _is_remote(path: object) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/last.ckpt``, and not a path on this machine."""
    return len(urlparse(str(path)).scheme) > 1


def _with_records(checkpoint: Any, sign: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a checkpoint after applying ``change`` to each callback's record that has the key ``sign``."""
    states = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    if not isinstance(states, dict):
        return checkpoint
    updated_states = {
        name: {**state, "record": change(state["record"])}
        for name, state in states.items()
        if isinstance(state, dict) and isinstance(state.get("record"), dict) and sign in state["record"]
    }
    return {**checkpoint, "callbacks": {**states, **updated_states}}
