"""State outside the module that starts anew with each client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as L
from torch.optim import Optimizer

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.local_training.outside import Carried
from lightning_fcl.validation import format_code_names

log = logging.getLogger(__name__)

_REMEDY = (
    'In `training_step`, add the values to a registered buffer of the module, whose reduction is "sum", and compute '
    "the state from this buffer."
)


@dataclass
class Isolation:
    """The result of the trial.

    Args:
        module: The module's name.
        carried: The state outside the module that starts anew with each client; None if there is none.
        gathered: The attributes of the module that training fills, and from which hooks at the end of a round compute
            the module's state.
    """

    module: str
    carried: Carried | None = None
    gathered: Sequence[str] = ()
    _warned: bool = False

    def warn(self) -> None:
        """Warn once of attributes that carry values of the clients' samples to the server."""
        if self.gathered and not self._warned:
            log.warning("%s %s", self._what(), _REMEDY)
        self._warned = True

    def refuse_gathered(self) -> None:
        """Raise ValueError if the server's model needs attributes that are filled in training, which nodes do."""
        if self.gathered:
            raise InvalidValueError(
                f"Expected hooks at the end of a round to use aggregated state only in a deployment. {self._what()} "
                f"On the server, where no client trains, they stay empty. {_REMEDY}"
            )

    def loose_state(
        self, module: L.LightningModule, optimizers: Sequence[Optimizer], previous_snapshot: ModuleSnapshot | None
    ) -> ModuleSnapshot:
        """Return the state beside the module's `state_dict` with which each client of a round starts.

        Warn before the first round of attributes that cannot be restored.

        Args:
            module: The module.
            optimizers: The module's optimizers.
            previous_snapshot: The state of the round before; None before the first round.
        """
        schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
        loose = ModuleSnapshot(module, optimizers, schedulers, previous_snapshot, self.carried)
        if previous_snapshot is None and loose.unknown_attributes:
            log.warning(
                "Clients find %s of `%s` as those before have left it, if training changes it: it cannot be looked "
                "into.",
                format_code_names(loose.unknown_attributes),
                type(module).__name__,
            )
        return loose

    def _what(self) -> str:
        return (
            f"Hooks of `{self.module}` at the end of a round compute its state from "
            f"{format_code_names(self.gathered)}, which the "
            "training of all clients fills: values of their samples reach the server's model and are not counted as "
            "uploads."
        )
