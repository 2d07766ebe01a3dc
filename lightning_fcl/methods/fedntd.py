"""FedNTD: keeps what the server knows of all classes but the true one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Step


@dataclass(eq=False)
class FedNTD(Method):
    """Every step: distils the classes that a sample is not of from the server (Lee et al. 2022, arXiv 2106.03097).

    ``task loss + beta * temperature^2 * KD`` over the logits of all classes but the true one, the teacher being the
    model that the client has received: its data teach it the true class, and make it forget the others. The square is
    that of the authors' code. A client keeps nothing, and sends what FedAvg sends.

    Args:
        beta: Weight of the distillation, at least 0; 0 is FedAvg.
        temperature: Softens both sides, above 0.

    Raises:
        ValueError: If an argument is out of range, or the module's output are no logits of classes.
        TypeError: If the batches are no pairs.

    Example:
        >>> FedNTD(beta=0.5).temperature
        1.0
    """

    needs: ClassVar[Needs] = Needs(labels=True, logits=True)

    beta: float = argument(1.0, at_least, 0)
    temperature: float = argument(1.0, above, 0)

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.beta == 0 or step.y is None:
            return 0.0
        true = torch.arange(step.output.shape[-1], device=step.y.device) == step.y[:, None]
        logits = step.output, step.predict(step.server, step.x)
        student, teacher = (each.masked_fill(true, -torch.inf) for each in logits)
        return self.beta * self.temperature**2 * step.mean(distillation_loss(student, teacher, self.temperature))
