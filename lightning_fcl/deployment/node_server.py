"""The server's place on a node: it has the state that the server has sent, and keeps the upload for the answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from lightning_fcl.deployment.changes import changes
from lightning_fcl.deployment.parcel import RefusedError
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import Aggregator, Rules, State
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.server import Extra, FederatedServer


class Outbox(Aggregator):
    """Keeps the upload of one client, as it would be added up: compressed, with what its methods contribute."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__({})
        self._names = names
        self.sent: State | None = None

    def set_aside(self, uploads: State, names: Sequence[str]) -> State:
        return uploads

    def add_all(self, uploads: Mapping[str, Tensor], weights: Sequence[float], numbers: Sequence[int]) -> None:
        self.sent = {name: uploads[name][0].detach().clone() for name in self._names}
        self.uploads = 1


class NodeServer(FederatedServer):
    """A `FederatedServer` whose clients are one, and whose aggregate is that client's upload, for the real server."""

    def __init__(self, recipe: FederatedServer, folder: Path, received: Collection[str]) -> None:
        store = ClientStore("disk", folder)
        super().__init__(store, compression=recipe.compression)
        self.outbox = Outbox(())
        self._received = received

    def begin_round(self, module: nn.Module, rules: Rules | None = None, extra: Extra | None = None) -> None:
        """Take the module's state, into which the server's has been loaded."""
        super().begin_round(module, rules, extra)
        self.aggregator = self.outbox = Outbox([name for name, reduction in self.reductions.items() if reduction.up])
        missing = [name for name, reduction in self.reductions.items() if reduction.down and name not in self._received]
        if missing:
            raise RefusedError(
                f"Expected the server to send {quoted(missing)} of this recipe's model but it did not. "
                "Deploy one recipe everywhere."
            )

    def upload_to_send(self) -> State | None:
        """What the client sends: what has changed of what it has got; None: it has nothing to send."""
        if self.outbox.sent is None:
            return None
        start = {name: self.reductions[name].start(self.state[name]) for name in self.outbox.sent}
        return changes(self.outbox.sent, start)
