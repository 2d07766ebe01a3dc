"""Methods that correct client drift or the mean of uploads: FedProx, SCAFFOLD, FedDyn and FedNova."""

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
from lightning_fcl.methods.functional import scalar_dtype, trainable_parameters
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.regularization import summed
from lightning_fcl.validation import at_least, format_code_names, format_names, validated


def active_reductions(module: L.LightningModule) -> dict[str, Reduction]:
    """Return the reductions of a module's tensors in the current fit, by name."""
    federation = find_federation(module.trainer)
    return get_reductions(module, federation.settings.rules if federation is not None else {})


def averaged_parameters(module: L.LightningModule) -> State:
    """Return the trainable parameters that clients both download and upload, by name."""
    reductions = active_reductions(module)
    return {
        name: p.detach()
        for name, p in trainable_parameters(module).items()
        if reductions[name].is_uploaded and reductions[name].is_downloaded
    }


def local_gradient_weight(group: Mapping[str, Any], steps: int) -> float:
    """Return the weight of the gradients of ``steps`` SGD steps in the parameter change, in units of the learning rate.

    Without momentum, this weight is the number of steps. With momentum and at least two steps, the weight is larger.
    Wang et al. 2020 call this weight ``||a||_1``. A parameter group without the entry ``momentum`` has no momentum.

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


def initial_velocity_weight(group: Mapping[str, Any], steps: int) -> float:
    """Return the weight of the initial velocity in the change by ``steps`` SGD steps, in units of the learning rate.

    The velocity is the momentum buffer of `torch.optim.SGD`. With momentum rho and K steps, the weight is
    ``rho + rho^2 + ... + rho^K``. With Nesterov's momentum, the weight is multiplied by rho.

    Example:
        >>> initial_velocity_weight({"lr": 0.1}, 3), initial_velocity_weight({"momentum": 0.5}, 3)
        (0.0, 0.875)
    """
    momentum = group.get("momentum", 0.0)
    weight: float = sum(momentum ** (step + 1) for step in range(steps))
    return weight * momentum if group.get("nesterov", False) else weight


class ServerUpdateMethod(Method):
    """Base class of methods whose `process_aggregate` updates the server's model from the mean of all uploads."""

    needs: ClassVar[Needs] = Needs(
        federation_reason='it has no server that aggregates uploads. Use `strategy="federated"`'
    )

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = require_federation(trainer, type(self).__name__, self.needs.federation_reason)
        methods = get_methods(trainer)
        preceding_names = [
            type(one).__name__ for one in methods_overriding(methods[: methods.index(self)], "process_aggregate")
        ]
        unfit = {
            f"`clients={self.clients}`": self.clients != "all",
            "a `Swarm` whose nodes may miss a synchronization": federation.participation.may_miss_sync,
            "a `FedBuff`": isinstance(federation.participation.synchronization, FedBuff),
            "a `server_optimizer`": federation.server.optimizer_settings is not None,
            f"{format_code_names(preceding_names)} earlier in the callbacks": bool(preceding_names),
        }
        for conflict in (what for what, there in unfit.items() if there):
            raise InvalidValueError(
                f"Expected the server's model to be the mean of all clients' uploads, because `{type(self).__name__}` "
                f"updates the model from this mean, but got {conflict}.",
                hint=f"Fit without {conflict.removesuffix(' earlier in the callbacks')}, or without "
                f"`{type(self).__name__}`.",
                argument=type(self).__name__,
                value=conflict,
            )


def proximal_term(params: Mapping[str, Tensor], server: Mapping[str, Tensor]) -> Tensor:
    """Return half the squared distance between ``params`` and the server's tensors with the same names."""
    return 0.5 * torch.stack([(value - server[name]).pow(2).sum() for name, value in params.items()]).sum()


@dataclass(eq=False)
class FedProx(Method):
    """FedProx (Li et al., 2020): adds the proximal term ``mu / 2 * ||w - w_server||^2`` (equation 2) to the loss.

    w_server is the model that the client has received. A client keeps no state, and uploads the same tensors as in
    FedAvg.

    Args:
        mu: Weight of the proximal term, at least 0. With 0, the method is FedAvg.
        pattern: Shell-style pattern of the parameters in the proximal term, such as ``"head.*"``.

    Raises:
        ValueError: If ``mu`` is negative. With ``mu`` above 0, also if ``pattern`` matches no trainable parameter.

    Example:
        >>> FedProx(mu=0.1).mu
        0.1
    """

    citations: ClassVar[tuple[str, ...]] = ("li2020fedprox",)

    mu: float = validated(0.1, at_least, 0)
    pattern: str = "*"

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if self.mu == 0:
            return 0.0
        params = {name: value for name, value in step.params.items() if fnmatchcase(name, self.pattern)}
        if not params:
            raise InvalidValueError(
                f"Expected `pattern` to match a trainable parameter, but `{self.pattern}` matches none.",
                hint="Omit `pattern`, or use a pattern that matches one of these parameters: "
                f"{format_names(step.params, 3)}.",
                argument="pattern",
                value=self.pattern,
            )
        return self.mu * proximal_term(params, step.received_state)


@dataclass(eq=False)
class SCAFFOLD(Method):
    """SCAFFOLD: control variates that correct client drift (Karimireddy et al., 2020, Algorithm 1).

    A step is ``y <- y - lr * (g(y) - c_i + c)`` (equation 3). y are the client's parameters, and g(y) is the gradient
    of the task loss. The server's control variates c and the client's c_i start at 0. After K steps a client sets c_i
    to ``c_i - c + (x - y) / (K * lr)`` (equation 4, option II), where x is the model that it received. The client
    uploads its model, and the change of c_i divided by the number of the stream's clients. The server adds the uploaded
    changes to c (equation 5). So upload and download are about twice as large as in FedAvg. A client that is not
    sampled keeps its c_i. With momentum, K is the `local_gradient_weight` of the steps. If clients also keep their
    optimizer state between rounds, the part of ``x - y`` that is due to the velocity at the start of the round is
    subtracted first (see `initial_velocity_weight`). A client then also keeps this velocity. Client-local parameters
    have no control variates. The paper's global step size is the learning rate of ``server_optimizer``.

    Each experience starts with c and all c_i at 0. The paper has a single task. Without the reset, c would contain the
    gradients of clients that have no samples of the experience. No client would subtract these gradients, so that they
    would bias the steps of all clients. If clients enter an experience in different rounds, c is not reset. In each
    experience except the first, a client then uses the change of c since its first download in the experience. The
    client keeps the c of this download in addition to c_i.

    Raises:
        ValueError: If there is no federation, or if the federation has several clients and ``client_weights`` is not
            ``"uniform"``. Also if the optimizer is not SGD without dampening, if its parameter groups differ in
            learning rate, momentum or ``nesterov``, or if the learning rate changes within a round.

    Example:
        >>> SCAFFOLD().vectorizable
        True
    """

    citations: ClassVar[tuple[str, ...]] = ("karimireddy2020scaffold",)

    needs: ClassVar[Needs] = Needs(
        uniform_weights=True, federation_reason="a single client has no drift to correct. Remove `SCAFFOLD`"
    )
    reductions: ClassVar[ReductionRules] = {"c.*": DeltaSum(), "clients": "download_only"}
    private_entries: ClassVar[tuple[str, ...]] = ("c.*",)
    of_experience: ClassVar[tuple[str, ...]] = ("c.*", "begun.*")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        settings = get_settings(trainer.optimizers[0])
        scheduled = require_federation(trainer, "SCAFFOLD", "").has_lr_schedule
        names = ("lr", "momentum", "nesterov")
        is_uniform = all(len({*settings.get(name, ())}) <= 1 for name in names)
        if settings["class"] != "SGD" or any(settings["dampening"]) or scheduled or not is_uniform:
            values = [f"{name}={settings[name]}" for name in (*names, "dampening") if name in settings]
            raise InvalidValueError(
                "Expected SGD without dampening and with one `lr`, `momentum` and `nesterov` in each round for "
                "`SCAFFOLD`, which computes gradients from parameter changes, but got "
                f"{settings['class']} with {', '.join(values)} (one value per parameter group)"
                f"{' and a schedule that changes `lr` within a round' * scheduled}.",
                hint="Use SGD with one parameter group and without dampening, and change the learning rate only "
                "between rounds.",
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
        state = {**client.method_state, **self._velocities(client)}
        return state if client.missed_sync else {**state, **self._variates(client, trained_state)}

    @staticmethod
    def _velocities(client: Client) -> StateSection:
        """Return the velocities with which the client's next round starts. {} if each round starts without velocity."""
        # `federation_reason` in `needs` requires a federation.
        assert client.federation is not None
        optimizer = client.module.trainer.optimizers[0]
        if not (client.federation.settings.keep_optimizer_state and optimizer.param_groups[0].get("momentum")):
            return {}
        names = {id(parameter): name for name, parameter in client.module.named_parameters()}
        buffers = {names[id(parameter)]: state.get("momentum_buffer") for parameter, state in optimizer.state.items()}
        velocities = {
            name: buffers[name] for name in strip_prefix(client.server_state, "c") if buffers.get(name) is not None
        }
        return with_prefix(velocities, "velocity")

    def _lacking(self, client: Client) -> State:
        """Return the correction ``c - c_i`` of a client's gradients, by parameter name.

        If clients enter experiences in different rounds, c is 0 at a client's first download in the experience. In this
        case, c is the change of the server's control variates since this download. In the first experience, c is always
        the server's current value.
        """
        local_variates, initial_variates = (
            strip_prefix(client.method_state, "c"),
            strip_prefix(client.method_state, "begun"),
        )
        return {
            n: value - initial_variates.get(n, 0) - local_variates[n]
            for n, value in strip_prefix(client.server_state, "c").items()
        }

    def _variates(self, client: Client, trained_state: State) -> StateSection:
        """Return the client's control variates after its training."""
        group = client.module.trainer.optimizers[0].param_groups[0]
        start, velocities = client.received_state, strip_prefix(client.method_state, "velocity")
        gradient_weight = local_gradient_weight(group, client.num_steps)
        velocity_weight = initial_velocity_weight(group, client.num_steps)
        variates = {}
        for name, value in self._lacking(client).items():
            change = (start[name] - trained_state[name]) / group["lr"]
            if name in velocities:
                change = change - velocity_weight * velocities[name].to(change.device)
            variates[name] = change / gradient_weight - value
        return with_prefix(variates, "c")


@dataclass(eq=False)
class FedDyn(ServerUpdateMethod):
    """FedDyn: dynamic regularization with a proximal and a linear term (Acar et al., 2021).

    The loss is ``task loss - <g_k, w> + alpha / 2 * ||w - w_server||^2`` (equation 1). g_k is ``-alpha`` times the sum
    of ``w_k - w_server``, the parameter changes of the client, over all its rounds. The new server model is the mean of
    the uploads plus s. s is the sum of all clients' parameter changes so far, divided by the number of the stream's
    clients. Algorithm 1 writes s as ``-h / alpha``. At a fixed point, the g_k are the gradients of the clients' losses
    and add up to 0. A client keeps g_k, and uploads the same tensors as in FedAvg. The terms leave out client-local
    parameters.

    Each experience starts with s and all g_k at 0. The paper has a single task, and gradients of an earlier task are no
    correction for the current task.

    Args:
        alpha: Weight of both terms, at least 0. With 0, the method is FedAvg.

    Raises:
        ValueError: If ``alpha`` is negative, if the server's model is not the uniform mean of all uploads, or if
            clients enter an experience in different rounds.

    Example:
        >>> FedDyn(alpha=0.1).alpha
        0.1
    """

    citations: ClassVar[tuple[str, ...]] = ("acar2021feddyn",)

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
        """Update the sum of parameter changes, and return the mean of the uploads plus this sum.

        This sum grows by ``participation_rate`` times the difference between the mean of the uploads and the previous
        server model. This product is the parameter change of the round, averaged over all clients of the stream.
        """
        for name, way in server.server_state.items():
            server.server_state[name] = way.add(
                server.state[name] - server.previous_state[name], alpha=server.participation_rate
            )
        return {name: server.state[name] + way for name, way in server.server_state.items()}


@dataclass(eq=False)
class FedNova(ServerUpdateMethod):
    """FedNova: normalized averaging of client updates (Wang et al., 2020, arXiv 2007.07481).

    A client with more local steps does not have more influence. A client k uploads ``x + (y_k - x) / tau_k``, where x
    is the received model, y_k the trained model, and tau_k the `local_gradient_weight` of its steps. The new server
    model is ``x + tau * sum_k p_k (y_k - x) / tau_k``, where p_k are the client weights and tau is the weighted mean of
    the tau_k. With equal numbers of steps this is FedAvg. With unequal numbers, FedAvg would minimize the losses
    weighted by ``p_k tau_k``. A client keeps no state, and uploads one number more than in FedAvg. Client-local
    parameters and buffers are not normalized. With an optimizer other than SGD, tau_k is the number of steps.

    Raises:
        ValueError: If the server's model is not the mean of the uploads of all clients in a round. Also if the
            optimizer's parameter groups differ in momentum or ``nesterov``, if it has dampening, or if it has momentum
            and ``keep_optimizer_state`` is True. The change of the parameters is then not proportional to ``tau_k``.

    Example:
        >>> FedNova().reductions
        {}
    """

    citations: ClassVar[tuple[str, ...]] = ("wang2020fednova",)

    vectorizable: ClassVar[bool] = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        settings = get_settings(trainer.optimizers[0])
        keeps_velocity = require_federation(trainer, "FedNova", "").settings.keep_optimizer_state
        unfit = {
            "dampening": any(settings.get("dampening", ())),
            "different `momentum` or `nesterov` in its parameter groups": any(
                len({*settings.get(name, ())}) > 1 for name in ("momentum", "nesterov")
            ),
            "momentum and `keep_optimizer_state=True`": keeps_velocity and any(settings.get("momentum", ())),
        }
        for conflict in (what for what, there in unfit.items() if there):
            raise InvalidValueError(
                "Expected an optimizer whose change of the parameters is a sum of the round's gradients with known "
                f"weights for `FedNova`, but got {settings['class']} with {conflict}.",
                hint=f"Fit without {conflict}.",
                argument="optimizer",
                value=settings["class"],
            )

    def init_server_state(self, module: L.LightningModule) -> State:
        return {"tau": torch.ones((), dtype=scalar_dtype(trainable_parameters(module)))}

    def transform_upload(self, client: Client, trained_state: State) -> State:
        start, tau = client.received_state, _tau(client)
        return {
            **trained_state,
            **{n: start[n] + (trained_state[n] - start[n]) / tau for n in averaged_parameters(client.module)},
        }

    def upload_statistics(self, client: Client, trained_state: State, data: Batch) -> State:
        return {"tau": torch.full_like(client.server_state["tau"], _tau(client))}

    def process_aggregate(self, server: Server) -> State:
        mean, previous_state = averaged_parameters(server.module), server.previous_state
        return {
            name: previous_state[name] + server.server_state["tau"] * (value - previous_state[name])
            for name, value in mean.items()
        }


def _tau(client: Client) -> float:
    return local_gradient_weight(client.module.trainer.optimizers[0].param_groups[0], client.num_steps)
