"""What methods need around them, said by each and checked in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import lightning.pytorch as L

from lightning_fcl.federation.aggregation import reductions_of
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.methods.functional import states_loss
from lightning_fcl.methods.step import matches

if TYPE_CHECKING:
    from lightning_fcl.methods.declaration import Declaration
    from lightning_fcl.simulation.federation import Federation


@dataclass(frozen=True)
class Needs:
    """What a method cannot work without.

    Args:
        labels: Batches are pairs ``[x, y]``.
        dicts: They may also be dicts of tensors, in a federation.
        logits: The module's output are logits of classes.
        loss: The module states the loss of samples apart from its training step.
        samples: `Method.end_round` and `Method.contribute` look at the round's samples.
        federation: Why a plain Trainer does not do, to be read after "got a plain one:"; empty: it does.
        head: Entries that match the method's argument ``head`` stay with the clients, in a federation.

    Example:
        >>> Needs(labels=True, federation="it has no clients").samples
        False
    """

    labels: bool = False
    dicts: bool = False
    logits: bool = False
    loss: bool = False
    samples: bool = False
    federation: str = ""
    head: bool = False


def check_needs(method: Declaration, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Refuse, before a fit, what a method cannot work with."""
    name, needs = type(method).__name__, method.needs
    if str(trainer.precision).startswith("16") and trainer.scaler is not None:
        raise ValueError(
            f'Expected a Trainer without loss scaling for `{name}` but got `precision="{trainer.precision}"`. Use '
            '"bf16-mixed" or "32-true".'
        )
    if needs.loss:
        states_loss(module, f" for `{name}`")
    if needs.federation:
        federation = need_federation(trainer, name, needs.federation)
        if needs.head:
            check_head(federation, module, vars(method)["head"])


def check_head(federation: Federation, module: L.LightningModule, head: str) -> None:
    """Refuse a pattern of a head that is all of a module or none of it, or that does not stay with the clients."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    chosen = sorted(name for name in trainable if matches(name, head))
    if not chosen or len(chosen) == len(trainable):
        raise ValueError(
            f"Expected `head` to match some of the trainable parameters but `{head}` matches {len(chosen)} of "
            f"{len(trainable)}: {', '.join(sorted(trainable)[:3])}, ..."
        )
    reductions = reductions_of(module, federation.strategy.rules)
    for name in chosen:
        if not reductions[name].own:
            raise ValueError(
                f'Expected the head to stay with the clients but {name} has the reduction "{reductions[name].name}". '
                f'Give the strategy `reductions={{"{head}": "none"}}`.'
            )
