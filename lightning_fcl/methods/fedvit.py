"""The methods FedRep (shared body and client-local heads) and FedViT (FedRep with gradient projection)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, get_args

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.batching import Batch, plan_batches
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import StateSection, local_tensors
from lightning_fcl.federation.protocols import FederationProtocol, find_federation
from lightning_fcl.methods.base import Pattern
from lightning_fcl.methods.context import Client, strip_prefix, with_prefix
from lightning_fcl.methods.episodic import add_to_task, finite_pairs, past_task_indices
from lightning_fcl.methods.functional import (
    GradientFn,
    make_gradient_fn,
    predictions,
    require_sample_loss,
    step_along,
    trainable_parameters,
)
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.projection import DistanceKind, most_dissimilar, project
from lightning_fcl.rng import make_client_keys, seed_all
from lightning_fcl.validation import at_least, one_of, unit_interval, validated


@dataclass(eq=False)
class FedRep(Method):
    """FedRep: head epochs, then body epochs, with client-local heads (Collins et al., 2021, Algorithm 1).

    In each round a client first trains the head with a frozen body, then the body with a frozen head. Frozen tensors
    stay bitwise identical. The server aggregates the body. The head must be client-local:
    ``FederatedStrategy(reductions={"model.head.*": "local"})``.

    Args:
        head_epochs: Number of local epochs for the head, at least 1.
        body_epochs: Number of local epochs for the body, at least 1. ``head_epochs + body_epochs`` overrides the
            strategy's `local_epochs`.
        head_pattern: Shell-style pattern of the head's tensor names.

    Raises:
        ValueError: If the Trainer does not use ``strategy="federated"``, ``head_pattern`` matches all trainable
            parameters or none, or the head is not client-local.

    Example:
        >>> FedRep(head_epochs=2, body_epochs=4).head_pattern
        'model.head.*'
    """

    citations: ClassVar[tuple[str, ...]] = ("collins2021fedrep",)

    needs: ClassVar[Needs] = Needs(federation_reason="it has no clients that share a body", local_head=True)

    head_epochs: int = validated(2, at_least, 1)
    body_epochs: int = validated(4, at_least, 1)
    head_pattern: str = "model.head.*"

    def local_epochs(self, client: Client) -> int | None:
        return self.head_epochs + self.body_epochs if client.is_active else None

    def trainable_patterns(self, client: Client) -> Pattern | None:
        return self.head_pattern if client.local_epoch < self.head_epochs else f"!{self.head_pattern}"


@dataclass(eq=False)
class FedViT(FedRep):
    """FedViT: gradient projection for past tasks, and integration steps after aggregation (Zuo et al., 2024).

    Only the body is aggregated. Declare the reduction ``"local"`` for the head. A client's round has three stages:

    1. *Integration* (section 3.4). Integration takes place in each round of a task except the client's first round of
       the task. g_b is the gradient of a batch at the body that the client trained before aggregation. g_a is the
       gradient at the received body. The client projects g_b so that, to first order, the step does not increase the
       loss at the received body. Then the client takes an optimizer step with the projected gradient.
    2. Head epochs: the head is trained and the body is frozen.
    3. Body epochs: the body is trained and the head is frozen. The gradient is projected (eq. 7 to 9) so that, to first
       order, the step does not increase the loss of any of the k selected past tasks. The selected tasks are those
       whose gradients differ most from the current gradient (section 3.3). The gradients of past tasks are computed at
       the current parameters from the kept samples of each task (eq. 5).

    In the paper, integration follows each aggregation immediately. Here it takes place at the start of the client's
    next round. With ``integrate_last`` it also follows the last aggregation of a task, for the body that the client
    predicts with.

    For each class of a task, the client keeps the share ``rho`` of the samples with the lowest loss, at least one
    (eq. 4). The loss is computed with the client's own model after the client's last round of the task. If the rounds
    of a task have different samples, the client selects from the new samples of each round, with its model after this
    round.

    Args:
        rho: Share of the samples of each class that is kept, above 0 and at most 1.
        k: Number of past tasks that constrain a step, at least 1. If there are fewer past tasks, all of them constrain
            the step.
        distance: Distance between two gradients: ``"wasserstein"`` (as in the paper) or ``"cosine"``.
        select_every: Number of steps after which a client selects its k tasks again, from the gradients of all past
            tasks.
        integration_epochs: Number of local epochs of integration. 0 disables integration.
        integrate_last: Whether integration also follows the last aggregation of a task.
        margin: Minimum weight of each constraint if a gradient violates a constraint, at least 0. Also used in
            integration. 0 is eq. 8 of the paper. The authors of GEM use 0.5.
        head_epochs: See `FedRep` for `head_epochs` and all other arguments.

    Raises:
        ValueError: If an argument is out of range, or the module has no `sample_loss`. See also `FedRep`.

    Example:
        >>> FedViT(rho=0.1, k=10).head_epochs
        2
    """

    citations: ClassVar[tuple[str, ...]] = ("zuo2024fedvit",)

    accumulates: ClassVar[bool] = True

    needs: ClassVar[Needs] = replace(FedRep.needs, tensors=True)

    rho: float = validated(0.1, unit_interval)
    k: int = validated(10, at_least, 1)
    distance: DistanceKind = validated("wasserstein", one_of, get_args(DistanceKind))
    select_every: int = validated(10, at_least, 1)
    integration_epochs: int = validated(1, at_least, 0)
    integrate_last: bool = False
    margin: float = validated(0.0, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The state from which the client starts the round, but with the body that it trained before aggregation.
        self._before: State | None = None
        # Number of steps in the client's round that past tasks have constrained.
        self._steps = 0
        self._chosen: list[int] = []
        # The buffer of constraint gradients is reused from step to step, because allocating it is slow.
        self._rows: Tensor | None = None

    # A subclass overrides these functions to store different information about a task and compute a gradient from it.

    def extract_knowledge(
        self, client: Client, method_state: StateSection, trained_state: State, data: Batch
    ) -> StateSection:
        """Return the client state with the information about the current task that `past_gradient` needs.

        ``client.result`` may contain such information from earlier rounds of the task.
        """
        x, y = finite_pairs(data)
        module = client.module
        with torch.no_grad():
            loss = require_sample_loss(module).sample_loss(predictions(module, trained_state, x), y.to(module.device))
        indices = lowest_loss(loss, y, self.rho)
        return add_to_task(
            method_state, client.result, {"x": x[indices], "y": y[indices]}, client.client_round.experience_idx
        )

    def past_tasks(self, client: Client) -> list[int]:
        """Return the indices of the past tasks for which the client state has information, in ascending order."""
        return past_task_indices(client)

    def past_gradient(self, client: Client, task: int, gradient_of: GradientFn) -> Tensor:
        """Return the gradient of a past task's loss at the current parameters, as a vector."""
        rows = client.method_state["task"] == task
        return gradient_of(client.method_state["x"][rows], client.method_state["y"][rows])

    # Stages of a client's round.

    def local_epochs(self, client: Client) -> int | None:
        usual = super().local_epochs(client)
        return (
            None
            if usual is None
            else usual + self.integration_epochs * self._goes_on(client.method_state, client.client_round)
        )

    def _goes_on(self, memory: StateSection, client_round: ClientRound) -> bool:
        """Return whether integration is enabled and the state has a body from an earlier round of the current task."""
        return self.integration_epochs > 0 and "at" in memory and int(memory["at"]) == client_round.experience_idx

    def prepare_client_state(self, client: Client) -> StateSection:
        return (
            client.method_state
            if self._goes_on(client.method_state, client.client_round)
            else _without_body(client.method_state)
        )

    def start_client(self, client: Client) -> None:
        self._before = (
            {**client.received_state, **strip_prefix(client.method_state, "body")}
            if "at" in client.method_state
            else None
        )
        self._steps, self._chosen, self._rows = 0, [], None

    def restore_module(self, module: L.LightningModule) -> None:
        self._before = self._rows = None

    @property
    def _integration(self) -> int:
        """Number of local epochs of integration. 0 if the client state has no body from before the aggregation."""
        return self.integration_epochs if self._before is not None else 0

    def trainable_patterns(self, client: Client) -> Pattern | None:
        learns_head = self._integration <= client.local_epoch < self._integration + self.head_epochs
        return self.head_pattern if learns_head else f"!{self.head_pattern}"

    def project_gradient(self, client: Client, gradient: Tensor, gradient_fn: GradientFn) -> Tensor:
        if self.trainable_patterns(client) == self.head_pattern:
            return gradient
        if client.local_epoch < self._integration:
            return project(gradient_fn(*finite_pairs(client.batch), state=self._before), gradient[None], self.margin)
        tasks = self.past_tasks(client)
        if not tasks:
            return gradient
        should_select = self._steps % self.select_every == 0 or len(tasks) <= self.k
        selected_tasks = tasks if should_select else self._chosen
        if self._rows is None or len(self._rows) < len(selected_tasks) or self._rows.shape[1] != len(gradient):
            self._rows = gradient.new_empty(len(selected_tasks), len(gradient))
        constraints = self._rows[: len(selected_tasks)]
        for row, task in zip(constraints, selected_tasks, strict=True):
            row.copy_(self.past_gradient(client, task, gradient_fn))
        self._steps += 1
        if len(selected_tasks) > self.k:
            picked = most_dissimilar(gradient, constraints, self.k, self.distance)
            self._chosen = [selected_tasks[row] for row in picked.tolist()]
            constraints = constraints[picked.to(constraints.device)]
        return project(gradient, constraints, self.margin)

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        client_round, memory = client.client_round, _without_body(client.method_state)
        if not self.integration_epochs or (client_round.is_last_round and not self.integrate_last):
            return memory
        body = {name: value for name, value in trained_state.items() if not fnmatchcase(name, self.head_pattern)}
        return {**memory, **with_prefix(body, "body"), "at": torch.tensor(client_round.experience_idx)}

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory = client.method_state if self.integrate_last else _without_body(client.method_state)
        return self.extract_knowledge(client, memory, trained_state, data)

    # Integration after the last aggregation of a task.

    def personalize(self, client: Client, state: State) -> State:
        body = {name: value.to(state[name].device) for name, value in strip_prefix(client.method_state, "last").items()}
        return {**state, **body} if body else state

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        if federation is None or not (self.integrate_last and self.integration_epochs):
            return
        received_state, store = (
            {n: v.detach().clone() for n, v in state_tensors(pl_module).items()},
            federation.server.client_store,
        )
        for client_round in federation.ending_clients(federation.current_round.round_idx):
            if not (self.applies_to(client_round) and federation.hosts(client_round.client_id)):
                continue
            memory = store.get_section(client_round.client_id, self.section_name)
            rest = _without_body(memory)
            if self._goes_on(memory, client_round):
                state = {**received_state, **local_tensors(store[client_round.client_id], pl_module.device)}
                rest |= with_prefix(
                    self._integrated(federation, client_round, state, strip_prefix(memory, "body")), "last"
                )
            store.set_section(client_round.client_id, self.section_name, rest)
        load_state_tensors(pl_module, received_state)

    def _integrated(
        self, federation: FederationProtocol, client_round: ClientRound, state: State, body: State
    ) -> State:
        """Return the body after integration on a client's data. The module contains the client's state afterwards."""
        module, stream, seed = federation.module, federation.stream, federation.seed
        (optimizer,) = federation.optimizers
        load_state_tensors(module, state)
        optimizer.state.clear()
        params = {
            name: p for name, p in trainable_parameters(module).items() if not fnmatchcase(name, self.head_pattern)
        }
        gradient, previous_state = make_gradient_fn(module, params), {**state, **body}
        x, y = finite_pairs(stream.client_samples(client_round.client_id, client_round.round_idx, seed))
        keys = make_client_keys(seed, [client_round.client_id], client_round.round_idx, "integration")
        plan = plan_batches(len(y), self.integration_epochs, stream.batch_plan, keys)
        with isolate_rng():
            for number, rows in enumerate(plan):
                # Both gradients use the same random numbers: computing a gradient does not advance the generators.
                seed_all(seed, client_round.client_id, client_round.round_idx, "integration", number)
                previous_gradient, current_gradient = (
                    gradient(x[rows], y[rows], previous_state),
                    gradient(x[rows], y[rows]),
                )
                step_along(module, optimizer, params, project(previous_gradient, current_gradient[None], self.margin))
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        return {name: state_tensors(module)[name].detach().clone() for name in body}


def lowest_loss(loss: Tensor, y: Tensor, rho: float) -> Tensor:
    """Return sorted indices of the samples that have the lowest loss in their class (FedViT, eq. 4).

    Args:
        loss: Loss of each sample, shape (n,).
        y: Class of each sample, shape (n,).
        rho: Share of each class's samples to return. At least one sample of each class is returned.
    """
    order = loss.argsort(stable=True).to(y.device)
    class_rows = []
    for label in torch.unique(y):
        rows = order[y[order] == label]
        class_rows.append(rows[: max(1, round(rho * len(rows)))])
    return torch.cat(class_rows).sort().values if class_rows else order


class LowestLoss:
    """FedViT's sample selection as an exemplar selection strategy for Avalanche: samples with the lowest loss first.

    The class has the method of Avalanche's ``ExemplarsSelectionStrategy``, so that Avalanche's buffers accept it.

    Example:
        >>> from types import SimpleNamespace
        >>> strategy = SimpleNamespace(model=torch.nn.Identity())
        >>> data = [(torch.tensor([1.0, 0.0]), 1), (torch.tensor([1.0, 0.0]), 0)]
        >>> LowestLoss().make_sorted_indices(strategy, data)
        [1, 0]
    """

    def make_sorted_indices(self, strategy: Any, data: Batch) -> list[int]:
        """Return the positions of a dataset's samples ``(x, y, ...)``, sorted by ascending loss.

        The loss is the cross-entropy of ``strategy.model`` on the sample.
        """
        if not len(data):
            return []
        x, y = (torch.stack([torch.as_tensor(sample[part]) for sample in data]) for part in (0, 1))
        logits = predictions(strategy.model, dict(strategy.model.state_dict()), x)
        loss = F.cross_entropy(logits, y.to(logits.device), reduction="none")
        order: list[int] = loss.argsort(stable=True).tolist()
        return order


def _without_body(memory: StateSection) -> StateSection:
    return {name: value for name, value in memory.items() if name != "at" and not name.startswith(("body.", "last."))}
