"""State outside the module that is reset for each client."""

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
    'In `training_step`, add the values to a registered buffer of the module with the reduction "sum". Compute the '
    "state from this buffer."
)


@dataclass
class Isolation:
    """State that could pass from one client to the next, as found by a trial before the first round.

    Args:
        module: The module's name.
        carried: The state outside the module that is reset for each client. None: no such state.
        gathered: The attributes that clients fill in training. The module's hooks at the end of a round compute the
            module's state from these attributes.
    """

    module: str
    carried: Carried | None = None
    gathered: Sequence[str] = ()
    _warned: bool = False

    def warn(self) -> None:
        """Warn once about attributes that pass values of the clients' samples to the server."""
        if self.gathered and not self._warned:
            log.warning("%s %s", self._what(), _REMEDY)
        self._warned = True

    def refuse_gathered(self) -> None:
        """Raise ValueError if the server's model depends on attributes that only training clients fill."""
        if self.gathered:
            raise InvalidValueError(
                "Expected hooks at the end of a round to use only aggregated state in a deployment, but they "
                f"also use attributes that are not aggregated. {self._what()} No client trains on the server, so these "
                f"attributes stay empty there. {_REMEDY}"
            )

    def loose_state(
        self, module: L.LightningModule, optimizers: Sequence[Optimizer], previous_snapshot: ModuleSnapshot | None
    ) -> ModuleSnapshot:
        """Return the state outside the module's `state_dict` with which each client of a round starts.

        Before the first round, warn about attributes that cannot be restored.

        Args:
            module: The module.
            optimizers: The module's optimizers.
            previous_snapshot: The state of the previous round. None before the first round.
        """
        schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
        loose = ModuleSnapshot(module, optimizers, schedulers, previous_snapshot, self.carried)
        if previous_snapshot is None and loose.unknown_attributes:
            log.warning(
                "Cannot restore %s of `%s` for each client. If training changes these attributes, the next client "
                "starts with the changed values.",
                format_code_names(loose.unknown_attributes),
                type(module).__name__,
            )
        return loose

    def _what(self) -> str:
        return (
            f"Hooks of `{self.module}` at the end of a round compute the module's state from "
            f"{format_code_names(self.gathered)}, which clients fill in training. Values of the clients' samples "
            "therefore reach the server's model, and they are not counted as uploads."
        )
