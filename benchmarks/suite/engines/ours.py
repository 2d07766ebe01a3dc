"""This library: one `Trainer.fit` with a `FederatedStrategy`."""

import logging
import os
import warnings

from lightning.pytorch.callbacks import Callback
from safetensors.torch import save_file

NAME = "ours"
DEVICES = 1


def refuses(workload):
    """Return None, because the engine supports every workload."""
    return None


class Clock(Callback):
    """A callback that marks the rounds and saves the server's last state."""

    def __init__(self, workload, marks, out):
        self.workload, self.marks, self.out = workload, marks, out

    def on_train_start(self, trainer, pl_module):
        """Mark the start of the first round."""
        if trainer.is_global_zero:
            self.marks.begin()

    def on_train_epoch_end(self, trainer, pl_module):
        """Mark the end of a round."""
        if trainer.is_global_zero:
            self.marks.round()

    def on_train_end(self, trainer, pl_module):
        """Save the server's last state."""
        if trainer.is_global_zero:
            save_file({n: v.contiguous() for n, v in self.workload.state_of(pl_module).items()}, self.out)


def run(workload, rounds, marks, out, device="cpu"):
    """Train with one `Trainer.fit`, mark each round, and write the server's last state."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": DEVICES}
    trainer = workload.trainer(rounds, Clock(workload, marks, out), **options)
    stream = workload.stream(rounds)
    # Only the first rank marks the time of the set-up. All other ranks set up their stream in the fit.
    if marks.root != os.getpid():
        trainer.fit(workload.task(), datamodule=stream)
        return
    marks.add("planning")
    stream.setup("fit")
    marks.add("planned")
    trainer.fit(workload.task(), datamodule=stream)
