"""`Trainer(strategy="federated")`."""

import logging
import os
import warnings

from lightning.pytorch.callbacks import Callback
from safetensors.torch import save_file

NAME = "ours"
DEVICES = 1


def refuses(workload):
    """It trains everything."""
    return None


class Clock(Callback):
    """Tells the rounds, and keeps the server's last state."""

    def __init__(self, workload, marks, out):
        self.workload, self.marks, self.out = workload, marks, out

    def on_train_start(self, trainer, pl_module):
        """The first round begins."""
        if trainer.is_global_zero:
            self.marks.begin()

    def on_train_epoch_end(self, trainer, pl_module):
        """A round has ended."""
        if trainer.is_global_zero:
            self.marks.round()

    def on_train_end(self, trainer, pl_module):
        """Keep the state."""
        if trainer.is_global_zero:
            save_file({n: v.contiguous() for n, v in self.workload.state_of(pl_module).items()}, self.out)


def run(workload, rounds, marks, out, device="cpu"):
    """One `Trainer.fit`."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": DEVICES}
    trainer = workload.trainer(rounds, Clock(workload, marks, out), **options)
    stream = workload.stream(rounds)
    if marks.root != os.getpid():  # another rank, whose stream is planned in the fit
        trainer.fit(workload.task(), datamodule=stream)
        return
    marks.add("planning")
    stream.setup("fit")
    marks.add("planned")
    trainer.fit(workload.task(), datamodule=stream)
