"""The ``config.yaml`` of a run."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fcl.evaluation.files import write_whole


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` when training starts: a fit that is refused leaves an earlier run's as it is."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write it, whole."""
        folder = Path(trainer.log_dir or ".")  # which all processes ask for, as the first one tells it
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / self.config_filename, self.parser.dump(self.config, skip_none=False, skip_validation=True))
