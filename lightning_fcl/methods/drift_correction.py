"""Clients that drift apart, and what corrects a mean of their uploads: FedProx, SCAFFOLD, FedDyn and FedNova."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import Reduction, ReductionRules, State, get_reductions
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.federation.protocols import find_federation, require_federation
from lightning_fcl.federation.reductions import DeltaSum
from lightning_fcl.federation.server_optimizer import get_settings
from lightning_fcl.methods.base import methods_overriding
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.context import Client, Server, Step, strip_prefix, with_prefix, zeros_like_state
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.regularization import summed
from lightning_fcl.validation import at_least, format_code_names, format_names, validated


def active_reductions(module: L.LightningModule) -> dict[str, Reduction]:
    """How a module's entries come together in the fit at hand, by name."""
    federation = find_federation(module.trainer)
    return get_reductions(module, federation.settings.rules if federation is not None else {})


def averaged_parameters(module: L.LightningModule) -> State:
    """The trainable parameters that a federation's clients receive and send, by name; its own stay with each."""
    reductions = active_reductions(module)
    return {
        name: p.detach()
        for name, p in trainable_parameters(module).items()
        if reductions[name].is_uploaded and reductions[name].is_downloaded
    }


def local_gradient_weight(group: Mapping[str, Any], steps: int) -> float:
    """The weights of all gradients in so many steps of SGD, added up: their number, and more with momentum.

    The ``||a||_1`` of Wang et al. 2020; of the groups of other optimizers it is the number of steps.

    Example:
        >>> local_gradient_weight({"lr": 0.1}, 3), local_gradient_weight({"momentum": 0.5}, 3)
        (3.0, 4.25)
    """
    total = velocity = 0.0
    momentum, nesterov = group.get("momentum", 0.0), group.get("nesterov", False)
    for _ in range(steps):
        velocity = momentum * velocity + 1
        total += 1 + momentum * velocity if nesterov else velocity
    return total


class ServerUpdateMethod(Method):
    """A method of all clients whose `process_aggregate` moves the model on from the mean of uploads."""

    needs: ClassVar[Needs] = Needs(federation_reason="no server brings uploads together. Use the strategy")

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = require_federation(trainer, type(self).__name__, self.needs.federation_reason)
        methods = get_methods(trainer)
        preceding_names = [
            type(one).__name__ for one in methods_overriding(methods[: methods.index(self)], "process_aggregate")
        ]
        unfit = {
            f"`clients={self.clients}`": self.clients != "all",
            "a `Swarm` whose nodes may miss it": federation.participation.may_miss_sync,
            "a `FedBuff`": isinstance(federation.participation.synchronization, FedBuff),
            "a `server_optimizer`": federation.server.optimizer_settings is not None,
            f"{format_code_names(preceding_names)} before it": bool(preceding_names),
        }
        for conflict in (what for what, there in unfit.items() if there):
            raise InvalidValueError(
                "Expected a server that goes to the mean of what all clients have trained from its model, for "
                f"`{type(self).__name__}`, which moves it from there, but got {conflict}.",
                hint=f"Leave {conflict.removesuffix(' before it')} out, or `{type(self).__name__}`.",
                argument=type(self).__name__,
                value=conflict,
            )


def proximal_term(params: Mapping[str, Tensor], server: Mapping[str, Tensor]) -> Tensor:
    """Half the squared distance between parameters and the server's, over the entries of ``params``."""
    return 0.5 * torch.stack([(value - server[name]).pow(2).sum() for name, value in params.items()]).sum()


@dataclass(eq=False)
class FedProx(Method):
    """Every step: adds ``mu / 2 * ||w - w_server||^2`` (Li et al. 2020, equation 2).

    Args:
        mu: Weight of the proximal term, at least 0; 0 is FedAvg.
        pattern: Shell-style pattern of the parameters that it holds, as in ``"head.*"``.

    Raises:
        ValueError: If ``mu`` is negative or ``pattern`` matches no trainable parameter.

    Example:
        >>> FedProx(mu=0.1).mu
        0.1
    """

    mu: float = validated(0.1, at_least, 0)
    pattern: str = "*"

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.mu == 0:
            return 0.0
        params = {name: value for name, value in step.params.items() if fnmatchcase(name, self.pattern)}
        if not params:
            raise InvalidValueError(
                f"Expected `pattern` to match a trainable parameter but `{self.pattern}` matches none.",
                hint=f"Leave `pattern` out, or use a pattern of {format_names(step.params, 3)}.",
                argument="pattern",
                value=self.pattern,
            )
        return self.mu * proximal_term(params, step.received_state)


@dataclass(eq=False)
class SCAFFOLD(Method):
    """Every step: adds to a client's gradient what it lacks of all clients' (Karimireddy et al. 2020, Algorithm 1).

    ``y <- y - lr * (g(y) - c_i + c)`` (equation 3), with control variates c of the server and c_i of the client, which
    begin at 0. After its K steps a client keeps ``c_i - c + (x - y) / (K * lr)`` as its c_i (equation 4, option II; x
    is the model that it has received), and sends its change, divided by the number of the stream's clients, beside the
    model; the server adds it to c (equation 5). So both ways carry twice what FedAvg's do. A client that is not drawn
    keeps its c_i. With momentum K is the `local_gradient_weight` of the steps; parameters that stay with the clients
    have no variates. The paper's global step size is that of ``server_optimizer``.

    Each experience starts with c and all c_i at 0. The paper has one task. Otherwise c would contain the gradients of
    clients without samples of the experience, which no client removes, and all clients would drift by them. If clients
    enter an experience in different rounds, c lasts. A client then uses the change of c since its first download in
    the experience, and keeps the c of that download beside c_i.

    Raises:
        ValueError: If there is no federation of uniform ``client_weights``, or no SGD at one learning rate in a round.

    Example:
        >>> SCAFFOLD().vectorizable
        True
    """

    needs: ClassVar[Needs] = Needs(
        uniform_weights=True, federation_reason="a single client's gradients lack nothing. Remove `SCAFFOLD`"
    )
    reductions: ClassVar[ReductionRules] = {"c.*": DeltaSum(), "clients": "download_only"}
    of_experience: ClassVar[tuple[str, ...]] = ("c.*", "begun.*")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        settings = get_settings(trainer.optimizers[0])
        scheduled = require_federation(trainer, "SCAFFOLD", "").has_lr_schedule
        is_uniform = all(len({*settings.get(name, ())}) <= 1 for name in ("lr", "momentum", "nesterov"))
        if settings["class"] != "SGD" or any(settings["dampening"]) or scheduled or not is_uniform:
            raise InvalidValueError(
                "Expected SGD without dampening, at one rate in a round, for `SCAFFOLD`, which reads gradients off "
                f"its moves, but got {settings}{', scheduled by step' * scheduled}.",
                hint="Use SGD, and schedules by round.",
                argument="optimizer",
                value=settings["class"],
            )

    def init_server_state(self, module: L.LightningModule) -> State:
        clients = torch.tensor(float(len(require_stream(module.trainer).plan.clients)))
        return {**with_prefix(zeros_like_state(averaged_parameters(module)), "c"), "clients": clients}

    def prepare_client_state(self, client: Client) -> StateSection:
        if not client.is_new_experience:
            return client.method_state
        return with_prefix(zeros_like_state(strip_prefix(client.server_state, "c")), "c") | client.method_state

    def enters_alone(self, client: Client) -> StateSection:
        c = strip_prefix(client.server_state, "c")
        return with_prefix(c if client.client_round.experience_idx else zeros_like_state(c), "begun")

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        lacking = {name: value for name, value in self._lacking(client).items() if name in step.params}
        return summed([(value * step.params[name]).sum() for name, value in lacking.items()], step.params)

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        number = client.server_state["clients"]
        return {
            name: (c - client.method_state[name]) / number for name, c in self._variates(client, trained_state).items()
        }

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return (
            client.method_state
            if client.missed_sync
            else {**client.method_state, **self._variates(client, trained_state)}
        )

    def _lacking(self, client: Client) -> State:
        """What a client's gradients lack of all clients': c - c_i."""
        local_variates, initial_variates = (
            strip_prefix(client.method_state, "c"),
            strip_prefix(client.method_state, "begun"),
        )
        return {
            n: value - initial_variates.get(n, 0) - local_variates[n]
            for n, value in strip_prefix(client.server_state, "c").items()
        }

    def _variates(self, client: Client, trained_state: State) -> StateSection:
        """The client's variates after its training."""
        group = client.module.trainer.optimizers[0].param_groups[0]
        distance, start = group["lr"] * local_gradient_weight(group, client.num_steps), client.received_state
        lacking = self._lacking(client).items()
        return with_prefix(
            {name: (start[name] - trained_state[name]) / distance - value for name, value in lacking}, "c"
        )


@dataclass(eq=False)
class FedDyn(ServerUpdateMethod):
    """Every step: a proximal term, and a linear one that remembers where the client wants to go (Acar et al. 2021).

    ``task loss - <g_k, w> + alpha / 2 * ||w - w_server||^2`` (equation 1), where g_k is minus alpha times the sum of
    how far the client's rounds have moved w, ``w_k - w_server``. The server goes to the mean of the uploads, plus the
    sum of all these ways so far divided by the number of the stream's clients: ``- h / alpha`` of Algorithm 1. Where
    nobody moves any more, the g_k are the gradients of the clients' losses and add up to 0. A client keeps g_k, and
    sends what FedAvg sends. Parameters that stay with the clients are left alone.

    Each experience starts with h and all g_k at 0: the paper has one task, and the gradients of another task are no
    correction for the current one.

    Args:
        alpha: Weight of both terms, at least 0; 0 is FedAvg.

    Raises:
        ValueError: If ``alpha`` is negative, no server goes to the uniform mean of what clients have made of it, or
            clients enter an experience in different rounds.

    Example:
        >>> FedDyn(alpha=0.1).alpha
        0.1
    """

    needs: ClassVar[Needs] = replace(ServerUpdateMethod.needs, uniform_weights=True)
    reductions: ClassVar[ReductionRules] = {"*": "constant"}
    of_experience: ClassVar[tuple[str, ...]] = ("*",)

    alpha: float = validated(0.01, at_least, 0)

    def init_server_state(self, module: L.LightningModule) -> State:
        return zeros_like_state(averaged_parameters(module)) if self.alpha else {}

    def prepare_client_state(self, client: Client) -> StateSection:
        return client.method_state or with_prefix(zeros_like_state(client.server_state), "way")

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.alpha == 0:
            return 0.0
        way = strip_prefix(client.method_state, "way")
        params = {name: value for name, value in step.params.items() if name in way}
        linear = summed(((way[name] * value).sum() for name, value in params.items()), step.params)
        return self.alpha * (linear + proximal_term(params, step.received_state))

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        ways = strip_prefix(client.method_state, "way").items()
        return {f"way.{name}": way + (trained_state[name] - client.received_state[name]) for name, way in ways}

    def process_aggregate(self, server: Server) -> State:
        """The mean, and all ways so far: those of this round are, over all clients, ``share`` of the mean's."""
        for name, way in server.server_state.items():
            server.server_state[name] = way.add(
                server.state[name] - server.previous_state[name], alpha=server.participation_rate
            )
        return {name: server.state[name] + way for name, way in server.server_state.items()}


@dataclass(eq=False)
class FedNova(ServerUpdateMethod):
    """Every round: clients send their mean step, so many steps are no more votes (Wang et al. 2020, arXiv 2007.07481).

    A client uploads ``x + (y - x) / tau_k``, x being what it has received, y what its training has left, and tau_k the
    `local_gradient_weight` of its steps. The server goes ``tau`` times as far as their mean, where ``tau`` is the mean
    of the tau_k, by the same weights: ``x + tau * sum_k p_k (y_k - x) / tau_k``. Where all take equally many steps that
    is FedAvg, which else finds the minimum of the losses weighted by ``p_k tau_k``. A client keeps nothing, and sends
    one number more than for FedAvg. Parameters that stay with the clients, and buffers, are left alone.

    Raises:
        ValueError: If no server goes to the mean of what all clients of a round have trained from its model.

    Example:
        >>> FedNova().reductions
        {}
    """

    vectorizable: ClassVar[bool] = True

    def init_server_state(self, module: L.LightningModule) -> State:
        return {"tau": torch.ones(())}

    def transform_upload(self, client: Client, trained_state: State) -> State:
        start, tau = client.received_state, _tau(client)
        return {
            **trained_state,
            **{n: start[n] + (trained_state[n] - start[n]) / tau for n in averaged_parameters(client.module)},
        }

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        return {"tau": torch.tensor(_tau(client))}

    def process_aggregate(self, server: Server) -> State:
        mean, previous_state = averaged_parameters(server.module), server.previous_state
        return {
            name: previous_state[name] + server.server_state["tau"] * (value - previous_state[name])
            for name, value in mean.items()
        }


def _tau(client: Client) -> float:
    return local_gradient_weight(client.module.trainer.optimizers[0].param_groups[0], client.num_steps)
