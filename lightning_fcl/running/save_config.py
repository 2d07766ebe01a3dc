"""The ``config.yaml`` of a run."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.results import CONFIG, start_over

_PLACES = ("config", "out", "ckpt_path", "weights_only")  # of one fit, where the file is of the run, wherever it lies


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` when training starts: a fit that is refused leaves an earlier run's as it is."""

    folder = Path("runs/fit")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not trainer.ckpt_path:
            start_over(self.folder)
        config = self.config.clone()
        for name in _PLACES:
            config.pop(name, None)
        write_whole(self.folder / CONFIG, self.parser.dump(config, skip_none=False, skip_validation=True))
