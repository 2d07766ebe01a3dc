"""The server of asynchronous rounds: it keeps the states from which clients are under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import ClientState
from lightning_fcl.federation.server import Extra, FederatedServer

if TYPE_CHECKING:
    from lightning_fcl.federation.fedbuff import FedBuff

_KEPT = "asynchronous"


class BufferedServer(FederatedServer):
    """A server whose clients start from its state at their download, and arrive some steps later."""

    def __init__(self, schedule: FedBuff, current_round: Callable[[], int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._schedule = schedule
        self._round = current_round
        self._following = 0  # the round after the last one that was finished
        self._versions: dict[int, State] = {}  # from which somebody is under way, or may be in this round

    def begin_round(self, module: nn.Module, rules: Rules | None = None, extra: Extra | None = None) -> None:
        super().begin_round(module, rules, extra)
        self._schedule.check_reductions(self.reductions)  # a module declares them in each round anew
        round = self._round()
        self._schedule.enter(round)
        earlier = {version: self._like_now(state) for version, state in self._versions.items() if version != round}
        self._versions = {**earlier, round: self.state}

    def _like_now(self, version: State) -> State:
        """An earlier state on the device of the present one: a checkpoint's comes back on the CPU."""
        for name, value in self.state.items():
            if name not in version or version[name].shape != value.shape:
                raise ValueError(
                    f"Expected the state that a client has downloaded to have `{name}` of shape {tuple(value.shape)} "
                    "but it is not so: the module has changed, or a checkpoint is damaged. Begin anew."
                )
        return {name: version[name].to(value.device) for name, value in self.state.items()}

    def download(self, clients: Sequence[str]) -> tuple[list[State], list[ClientState]]:
        states, kept = super().download(clients)
        return [self._downloaded(client, state) for client, state in zip(clients, states, strict=True)], kept

    def _downloaded(self, client: str, state: State) -> State:
        version = self._version_of(client)
        if version is self.state:
            return state
        return {n: v if self.reductions[n].own else version[n] for n, v in state.items()}

    def _version_of(self, client: str) -> State:
        return self._versions[self._round() - self._staleness.get(client, 0)]

    @property
    def _staleness(self) -> Mapping[str, int]:
        return self._schedule.timed(self._round()).staleness

    def upload(self, client_rounds: Sequence[ClientRound], states: Mapping[str, Tensor]) -> list[bool]:
        parts = client_rounds if isinstance(client_rounds, ClientRounds) else ClientRounds.of(client_rounds)
        staleness = self._staleness
        if any(client in staleness for client in parts.clients):
            states = {**states, **{name: self._brought_up(name, states[name], parts.clients) for name in self._learnt}}
        return super().upload(parts, states)

    def _brought_up(self, name: str, values: Tensor, clients: Sequence[str]) -> Tensor:
        """Uploads of an entry as if to the server's present state: that of a client without staleness as it is."""
        staleness, rows = self._staleness, []
        for value, client in zip(values, clients, strict=True):
            if age := staleness.get(client, 0):
                value = self.state[name] + self._schedule.scale(age) * (value - self._version_of(client)[name])
            rows.append(value)
        return torch.stack(rows)

    def finish_round(self) -> State:
        state = super().finish_round()
        self._following = self._round() + 1
        self._versions = {version: self._versions[version] for version in self._schedule.under_way(self._following)}
        return state

    def state_dict(self, clients: Mapping[str, ClientState] | None = None) -> dict[str, Any]:
        clock = self._schedule.state_dict(self._following)
        return {**super().state_dict(clients), _KEPT: {**clock, "versions": self._versions}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        kept = state.get(_KEPT)
        if not isinstance(kept, Mapping) or not _is_whole(kept):
            raise ValueError(
                f"Expected `{_KEPT}` of the checkpoint to say who is under way, and from which state, but got "
                f"{kept!r:.200}. Continue from another one."
            )
        self._schedule.load_state_dict(kept)
        self._following, self._versions = kept["round"], dict(kept["versions"])


def _is_whole(kept: Mapping[str, Any]) -> bool:
    """Whether a clock of a checkpoint is one, with the states from which clients are under way."""
    versions, flights = kept.get("versions"), kept.get("flights")
    if not (isinstance(versions, Mapping) and isinstance(flights, list)):
        return False
    kinds = (int, int, str, int)
    return (
        all(isinstance(kept.get(name), int) for name in ("round", "now"))
        and all(isinstance(one, list) and tuple(map(type, one)) == kinds and one[3] in versions for one in flights)
        and all(isinstance(of, Mapping) and all(isinstance(v, Tensor) for v in of.values()) for of in versions.values())
    )
