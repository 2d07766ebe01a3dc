"""Averages of the server's model over rounds: exponential moving averages and equally weighted averages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import (
    ReductionRules,
    State,
    check_state,
    get_reductions,
    load_state_tensors,
    state_tensors,
)
from lightning_fcl.federation.protocols import HasAggregationHook, require_federation
from lightning_fcl.federation.reductions import Sum
from lightning_fcl.methods.base import methods_overriding
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.validation import at_least, validate_fields, validated

log = logging.getLogger(__name__)

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class ServerWeightAveraging(Callback):
    """Callback that averages the server's model over rounds, and evaluates and saves the average.

    The average is updated once per round, after aggregation, the server's optimizer and the methods. In the first
    averaged round, the average is the server's model. In each later round with the server's weights ``w``:

    - With a ``decay``, an exponential moving average (EMA): ``average = decay * average + (1 - decay) * w``.
    - With ``decay=None``, stochastic weight averaging (SWA): the mean of the weights of all averaged rounds.

    Training does not use the average: clients download the server's model. The average replaces the server's model

    - in validation and in `ContinualMetrics`. A model of a client after aggregation is the average with the client's
      client-local parameters;
    - in the ``state_dict`` of checkpoints. The state of this callback in the checkpoint contains the server's model, so
      that a resumed fit is bitwise identical to an uninterrupted fit;
    - in the module, when the fit ends. If the fit is continued, the server's model is restored first.

    Averaged tensors are the floating-point parameters and buffers that clients upload, for example the running
    statistics of batch normalization. Copied from the server's model are integers, sums (reductions such as ``sum``),
    client-local tensors, and tensors that are not uploaded. The server state of methods, such as class counts, is not
    averaged. Averages of float16 and bfloat16 tensors are computed in float32. If a tensor grows between rounds, its
    new elements start with the values of the server's model.

    Args:
        decay: Weight of the previous average, at least 0 and below 1. An average covers about ``1 / (1 - decay)``
            rounds. None: equal weights of all averaged rounds.
        start_round: First round that is averaged, from 0. Before this round, the server's model is evaluated and saved.

    Raises:
        ValueError: If an argument is out of range. `trainer.fit` raises ValueError if the Trainer does not run a
            federation, if the module has ``on_after_aggregation``, such as a ridge regression, if a method predicts
            with class means of features, such as `ICaRL`, or if no tensor can be averaged.

    Example:
        >>> ServerWeightAveraging(decay=0.95).decay
        0.95
    """

    decay: float | None = 0.9
    start_round: int = validated(0, at_least, 0)

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.decay is not None and not 0 <= self.decay < 1:
            raise InvalidValueError(
                f"Expected `decay` to be at least 0 and below 1, but got {self.decay}.",
                hint="Use for example `decay=0.9`, or `decay=None` for equal weights of all rounds.",
                argument="decay",
                value=self.decay,
            )
        # Number of averaged rounds.
        self.num_averaged = 0
        self._average: State = {}
        # The server's values of the averaged tensors while the module contains the average. Otherwise None.
        self._server: State | None = None
        # Replaces the server's model by the average during validation.
        self._validation = ExitStack()

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that a resumed fit must have."""
        return {"decay": self.decay, "start_round": self.start_round}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._check(trainer, pl_module)

    def _check(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        name = type(self).__name__
        federation = require_federation(
            trainer, name, "use `EMAWeightAveraging` of `lightning.pytorch.callbacks` in a plain Trainer"
        )
        averages = [one for one in get_callbacks(trainer) if isinstance(one, ServerWeightAveraging)]
        if len(averages) > 1:
            raise InvalidValueError(
                f"Expected one `{name}` among the callbacks, but got {len(averages)}.",
                hint="Remove the others.",
                argument="callbacks",
                value=len(averages),
            )
        if isinstance(module, HasAggregationHook):
            raise InvalidValueError(
                f"Expected a module without `on_after_aggregation` for `{name}`, but got a "
                f"`{type(module).__name__}`. This function computes weights from other tensors of the server's state. "
                "The average of such weights does not match the average of these tensors.",
                hint=f"Remove `{name}`.",
                argument="callbacks",
                value=type(module).__name__,
            )
        by_features = [one for one in methods_overriding(get_methods(trainer), "rescore") if one.needs.features]
        if by_features:
            method = type(by_features[0]).__name__
            raise InvalidValueError(
                f"Expected no method that predicts with class means of features together with `{name}`, but got "
                f"`{method}`. Its class means belong to the models of the current round, not to the average.",
                hint=f"Remove `{name}` or `{method}`.",
                argument="callbacks",
                value=method,
            )
        if not _averaged_names(module, federation.settings.rules):
            raise InvalidValueError(
                f"Expected at least one floating-point tensor that clients upload for `{name}`, but the reductions of "
                "the module are sums, constant or client-local.",
                hint=f"Remove `{name}`, or remove `reductions` of the strategy.",
                argument="reductions",
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the server's model if this fit continues another one. Otherwise, start a new average."""
        tensors, average, server = state_tensors(pl_module), self._average, self._server
        self._server = None
        if server is not None and all(
            name in tensors and torch.equal(value.to(tensors[name]), tensors[name]) for name, value in average.items()
        ):
            self._average = {name: value.to(tensors[name].device) for name, value in average.items()}
            _write(pl_module, server)
        elif server is not None or trainer.current_epoch == 0:
            self._average, self.num_averaged = {}, 0

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the server's model of the round to the average."""
        if trainer.current_epoch < self.start_round:
            return
        rules = require_federation(trainer, type(self).__name__, "it has no rounds").settings.rules
        tensors = state_tensors(pl_module)
        current = {name: _wide(tensors[name]) for name in _averaged_names(pl_module, rules)}
        average = {name: self._grown(name, value) for name, value in current.items()}
        make_update: Any = get_swa_multi_avg_fn if self.decay is None else partial(get_ema_multi_avg_fn, self.decay)
        make_update()([*average.values()], [*current.values()], self.num_averaged)
        self._average, self.num_averaged = average, self.num_averaged + 1

    def _grown(self, name: str, current: Tensor) -> Tensor:
        """Return the average of a tensor, in the shape of its current value. New elements have the current values."""
        average = self._average.get(name)
        if average is not None and average.shape == current.shape:
            return average
        if average is not None and self.decay is None:
            raise InvalidValueError(
                f"Expected tensors of constant shapes for `{type(self).__name__}` with `decay=None`, but the shape of "
                f"`{name}` was {tuple(average.shape)} and is {tuple(current.shape)}. New elements have no values in "
                "earlier rounds, so they have no equally weighted mean.",
                hint="Use an exponential moving average, for example `decay=0.9`.",
                argument="decay",
            )
        new_average = current.clone()
        if average is not None and average.dim() == current.dim():
            common = tuple(slice(min(sizes)) for sizes in zip(average.shape, current.shape, strict=True))
            new_average[common] = average[common]
        return new_average

    @contextmanager
    def averaged(self, module: L.LightningModule) -> Iterator[bool]:
        """Temporarily replace the server's model in a module by the average. Yield whether the module was changed."""
        if self._server is not None or not self._average:
            yield False
            return
        self._enter(module)
        try:
            yield True
        finally:
            server, self._server = self._server, None
            _write(module, server or {})

    def _enter(self, module: L.LightningModule) -> None:
        tensors = state_tensors(module)
        # Between the growth of a tensor and the end of the round, the average of the tensor has the old shape.
        names = [
            name for name, value in self._average.items() if name in tensors and tensors[name].shape == value.shape
        ]
        self._server = {name: tensors[name].detach().clone() for name in names}
        _write(module, {name: self._average[name] for name in names})

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._validation.enter_context(self.averaged(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._validation.close()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the average into the module."""
        if self._average:
            self._enter(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the server's model. The strategy saves the average as the ``state_dict`` of the checkpoint."""
        tensors = state_tensors(pl_module)
        server = {name: tensors[name].detach() for name in self._average} if self._server is None else self._server
        checkpoint["callbacks"][self.state_key] = {
            "num_averaged": self.num_averaged,
            "server": server,
            # The `state_dict` contains these averages in lower precision.
            "average": {n: value for n, value in self._average.items() if value.dtype != tensors[n].dtype},
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load the average and the server's model. `on_train_start` writes the server's model into the module."""
        if trainer.state.fn != "fit":
            return
        own_state = checkpoint["callbacks"].get(self.state_key)
        if own_state is None:
            log.warning(
                "The checkpoint contains no state of `%s`. A new average starts in the next round.", type(self).__name__
            )
            self._average, self._server, self.num_averaged = {}, None, 0
            return
        tensors = state_tensors(pl_module)
        check_state(pl_module, {**pl_module.state_dict(), **own_state["server"]})
        self.num_averaged, self._server = own_state["num_averaged"], own_state["server"]
        self._average = {name: tensors[name].detach().clone() for name in own_state["server"]} | own_state["average"]


def _averaged_names(module: L.LightningModule, rules: ReductionRules) -> list[str]:
    reductions = get_reductions(module, rules)
    return [
        name
        for name, value in state_tensors(module).items()
        if value.is_floating_point() and reductions[name].is_uploaded and not isinstance(reductions[name], Sum)
    ]


def _wide(value: Tensor) -> Tensor:
    return value.detach().float() if value.dtype in _LOW_PRECISION else value.detach()


def _write(module: L.LightningModule, state: State) -> None:
    load_state_tensors(module, {**state_tensors(module), **state})


def find_weight_averaging(trainer: L.Trainer) -> ServerWeightAveraging | None:
    """Return the `ServerWeightAveraging` among the callbacks of a Trainer, or None."""
    return next((one for one in get_callbacks(trainer) if isinstance(one, ServerWeightAveraging)), None)


@contextmanager
def averaged_weights(trainer: L.Trainer, module: L.LightningModule) -> Iterator[bool]:
    """Temporarily replace the server's model in a module by its average over rounds.

    Yields:
        Whether the module was changed. False if the Trainer has no `ServerWeightAveraging`, before the first averaged
        round, and if the module already contains the average.
    """
    averaging = find_weight_averaging(trainer)
    if averaging is None:
        yield False
        return
    with averaging.averaged(module) as is_average:
        yield is_average
