"""Predictions by a rule of a method's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
from torch import Tensor, nn

from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import overrides


@contextmanager
def predicting(module: L.LightningModule) -> Iterator[None]:
    """Let a module predict by the rule of a method of its Trainer, if one has a rule, in place of its own output."""
    ruling = [method for method in methods_of(module.trainer) if overrides(method, "predict")]
    if not ruling:
        yield
        return
    method, federation = ruling[0], federation_of(module.trainer)
    server = federation.server.kept_for(method.section) if federation is not None else method.server_entries
    server = server or method.server_state(module)

    def rule(hooked: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return method.predict(server, module, args[0], output)

    handle = module.register_forward_hook(rule)
    try:
        yield
    finally:
        handle.remove()
