"""How checkpoints come to a disk: whole, or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_fcl.evaluation.files import write_whole


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it there.

    Lightning's moves it there from the system's temporary folder. That may be on another disk: then a move is a copy,
    which a kill or a full disk leaves half-written. What is no path of this machine, as ``s3://...``, is left to it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it.

        Raises:
            NoRoomError: If the disk is full; an earlier checkpoint is as it was.
        """
        if len(urlparse(str(path)).scheme) > 1 or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = io.BytesIO()
        torch.save(checkpoint, content)
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content.getvalue())
