"""FedWEIT: a task's weights combine a shared base, a mask, and sparse adaptive weights of this and other clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, get_reductions
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.packing import pack_nonzero, unpack_nonzero
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.replay import Replay
from lightning_fcl.models.decomposition import FedWEITNet, prune
from lightning_fcl.tasks.classification import Classifier
from lightning_fcl.validation import at_least, validated


@dataclass(eq=False)
class FedWEIT(Method):
    """FedWEIT: federated weighted inter-client transfer with decomposed weights (Yoon et al., 2021).

    The network is a `FedWEITNet` with weights ``theta = B * sigmoid(m) + A + sum_j alpha_j A_j``. B is the base and m
    the mask. A are sparse weights of the task, called its adaptive. The attention alpha_j is the weight of the adaptive
    A_j in the knowledge base. The knowledge base contains adaptives of other clients. A client minimizes (eq. 2)::

        task loss + l1 (||A||_1 + sum_i ||A_i||_1) + mask_l1 ||m||_1 + l2 sum_i ||B * sigmoid(m_i) + A_i - theta*_i||^2
        + weight_decay / 2 (||A||^2 + ||m||^2, and ||B||^2 in the first task)

    The index i runs over the client's past tasks, whose A_i are trained as well. ``theta*_i`` is the value of
    ``B * sigmoid(m_i) + A_i`` after the client's last training in the previous task. The line with ``weight_decay``
    follows the authors' code. Three other points of the authors' code differ from the paper and from this
    implementation: the ``l2`` term has a factor 1/2, ``mask_l1`` is 0, and past A_i are not trained
    (``retroactive=False``).

    After a round a client uploads the base. In each layer, the units with the smallest ``|m|`` are uploaded as zeros:
    the share ``sparsity`` of all units. The server averages each unit over the clients that upload it. A unit that no
    client uploads does not change. After each round that may be the last round of its task, a client also uploads A.
    Values of A with a magnitude up to the network's `threshold` are set to zero first. When a client starts a task, it
    receives the A of the latest finished task of each other client, see ``kb_size``.

    The parameters of each task must be client-local. Pass ``FederatedStrategy(reductions={"model.tasks.*": "local",
    "model.net.head.*": "local", "model.net.body.*weight": "sparse_mean"})``. Other differences from the authors' code
    are:

    - Tensors that are not decomposed are averaged over the clients, except the head. After each local training, a
      client stores a copy of all tensors that are not decomposed, for later predictions of the task.
    - The server's means use the client weights of the federation.
    - The number of a layer's units that are uploaded as zeros is rounded down. The authors' code adds 1 to this number.
    - A starts at a third of the current base, not of the first base.
    - The knowledge base contains no A of the client itself.

    Plain SGD is stable only if ``learning rate * 2 * l2 * (1 + number of past tasks)`` is below 2.

    Args:
        l1: Weight of the L1 norm of the adaptives, at least 0.
        l2: Weight of the change of past tasks' weights (the ``l2`` term of the loss), at least 0.
        weight_decay: Weight of half the squared norms of A, m and, in the first task, B, at least 0.
        sparsity: Share of each layer's units whose base is not uploaded, at least 0 and below 1.
        mask_l1: Weight of the L1 norm of the mask, at least 0. None: equal to ``l1``.
        kb_size: Maximum number of adaptives that a client receives when it starts a task, drawn at random. None: the
            adaptives of all other clients.
        retroactive: Whether the adaptives of past tasks are also trained.
        per_task: Whether each task has a separate mask and adaptive, as in the paper. If False, all tasks share one
            mask and one adaptive, in a `FedWEITNet` with one task. The baseline of Zuo et al. (PuzzleFL) seems to work
            this way, with ``kb_size=0, sparsity=0.0, mask_l1=0.0, l2=0.5`` and an upload of the base only.
        clients: Clients that use the method. All other clients train the plain network. See `Method`.

    Raises:
        ValueError: If the Trainer does not use ``strategy="federated"``, or has a method other than `FedWEIT` and
            `Replay`. Also if a reduction is missing, or the module is not a task-incremental `Classifier` of a
            `FedWEITNet` with enough tasks.

    Example:
        >>> FedWEIT(l1=1e-3, l2=100.0, kb_size=4).sparsity
        0.3
    """

    citations: ClassVar[tuple[str, ...]] = ("yoon2021fedweit",)

    vectorizable: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(federation_reason="it has no other clients whose weights `FedWEIT` can use")

    l1: float = validated(1e-3, at_least, 0)
    l2: float = validated(100.0, at_least, 0)
    weight_decay: float = validated(1e-4, at_least, 0)
    sparsity: float = 0.3
    mask_l1: float | None = validated(None, at_least, 0)
    kb_size: int | None = validated(None, at_least, 0)
    retroactive: bool = True
    per_task: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sparsity < 1:
            raise InvalidValueError(
                f"Expected `sparsity` to be at least 0 and below 1, but got {self.sparsity}.",
                argument="sparsity",
                value=self.sparsity,
            )
        self.mask_l1 = self.l1 if self.mask_l1 is None else self.mask_l1
        # On the server: the packed adaptive of each client's latest finished task.
        self.knowledge: dict[str, Tensor] = {}
        # On the server: the packed adaptive of each client's current task, from its latest upload.
        self._ending: dict[str, Tensor] = {}
        self._gates: list[Tensor] = []

    def _place(self, memory: StateSection) -> int:
        """Return the index in the network's ``tasks`` of the client's current mask and adaptive."""
        return int(memory["tasks"]) - 1 if self.per_task else 0

    # Client side.

    def prepare_client_state(self, client: Client) -> StateSection:
        memory, client_round = client.method_state, client.client_round
        if not client.is_active or not client.is_new_experience:
            return memory
        model, num_past_tasks = get_decomposed(client.module), int(memory.get("tasks", torch.tensor(0)))
        new: StateSection = {
            "tasks": torch.tensor(num_past_tasks + 1),
            "experience": torch.tensor(client_round.experience_idx),
        }
        new["classes"] = torch.tensor(client_round.task_classes)
        for i in range(num_past_tasks):
            if not self.per_task and i < num_past_tasks - 1:
                new[f"target.{i}"] = memory[f"target.{i}"]
                continue
            mask, adaptive = (
                client.received_state[f"model.tasks.{i * self.per_task}.{name}"] for name in ("mask", "adaptive")
            )
            new[f"target.{i}"] = memory["base"].to(adaptive) * model.mask_vector(mask) + adaptive
        return new | client.reply

    def reply(self, client: Client) -> State:
        """Return the packed adaptives of other clients if the client starts a task, otherwise {}."""
        if not client.is_active or not client.is_new_experience:
            return {}
        other_clients = [other for other in sorted(self.knowledge) if other != client.client_round.client_id]
        if self.kb_size is not None:
            other_clients = [
                other_clients[i] for i in sorted(torch.randperm(len(other_clients))[: self.kb_size].tolist())
            ]
        return {f"kb.{j}": self.knowledge[other] for j, other in enumerate(other_clients)}

    def start_client(self, client: Client) -> None:
        memory = client.method_state
        if not client.is_active:
            return
        model: Any = get_decomposed(client.module)
        task_idx = self._place(memory)
        sources = sum(1 for name in memory if name.startswith("kb."))
        adaptive_template = next(model.net.parameters()).detach().new_zeros(model.size)
        model.set_adaptives([unpack_nonzero(memory[f"kb.{j}"], adaptive_template) for j in range(sources)])
        is_new_task = model.num_started_tasks <= task_idx
        # The condition is True in the client's first round of each task.
        if is_new_task or (not self.per_task and "base" not in memory):
            (model.start_task if is_new_task else model.resume_task)(memory["classes"], sources)
            model.update_buffers_()
        for i, task in enumerate(model.tasks):
            task.adaptive.requires_grad_(i == task_idx or (self.retroactive and i < task_idx))
            task.mask.requires_grad_(i == task_idx)
            task.attention.requires_grad_(i == task_idx and sources > 0)
        with torch.no_grad():
            self._gates = [model.mask_vector(task.mask) for task in model.tasks[:task_idx]] if self.l2 else []

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        model: Any = get_decomposed(client.module)
        task_idx, num_past_tasks = self._place(client.method_state), int(client.method_state["tasks"]) - 1
        current_task = model.tasks[task_idx]
        total: Tensor = self.l1 * current_task.adaptive.abs().sum() + self.mask_l1 * current_task.mask.abs().sum()
        base: Tensor = model.base_vector()
        decayed = [current_task.adaptive, current_task.mask, *([] if num_past_tasks else [base])]
        total = total + self.weight_decay / 2 * torch.stack([value.square().sum() for value in decayed]).sum()
        for task in model.tasks[:task_idx] if self.retroactive else []:
            total = total + self.l1 * task.adaptive.abs().sum()
        gates = self._gates if self.per_task or not self.l2 else [model.mask_vector(current_task.mask)] * num_past_tasks
        for i, gate in enumerate(gates):
            adaptive = model.tasks[i if self.per_task else 0].adaptive
            drift = torch.addcmul(adaptive - client.method_state[f"target.{i}"], base, gate)
            total = total + self.l2 * drift.dot(drift)
        return total

    def transform_upload(self, client: Client, trained_state: State) -> State:
        model = get_decomposed(client.module)
        model.update_buffers_()
        masks = torch.split(trained_state[f"model.tasks.{self._place(client.method_state)}.mask"], model.units)
        upload = dict(trained_state)
        for name, mask in zip((f"model.net.{name}" for name in model.names), masks, strict=True):
            upload[name] = trained_state[name] * kept_mask_units(mask, self.sparsity).view(
                -1, *[1] * (trained_state[name].dim() - 1)
            )
        return upload

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory = client.method_state
        if not client.is_active:
            return memory
        names = get_decomposed(client.module).names
        return {**memory, "base": torch.cat([trained_state[f"model.net.{name}"].flatten() for name in names])}

    def message(self, client: Client, trained_state: State) -> State:
        """Return the client's adaptive if its task may end with this round, otherwise {}."""
        if not client.may_end:
            return {}
        adaptive = trained_state[f"model.tasks.{self._place(client.method_state)}.adaptive"].detach()
        return {"adaptive": prune(adaptive, get_decomposed(client.module).threshold)}

    # Server side.

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        # `needs` requires a federation.
        assert federation is not None
        arrived = federation.server.messages.get(self.section_name, {})
        self._ending |= {client: pack_nonzero(sent["adaptive"]) for client, sent in arrived.items() if sent}
        for client_round in federation.ending_clients(federation.current_round.round_idx):
            if client_round.client_id in self._ending:
                self.knowledge[client_round.client_id] = self._ending.pop(client_round.client_id)

    def state_dict(self) -> dict[str, Any]:
        return {"knowledge": self.knowledge, "ending": self._ending}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.knowledge, self._ending = dict(state_dict["knowledge"]), dict(state_dict["ending"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.knowledge, self._ending = {}, {}

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        other_methods = [type(m).__name__ for m in get_methods(trainer) if not isinstance(m, FedWEIT | Replay)]
        if other_methods:
            raise InvalidValueError(
                "Expected no method other than `Replay` together with `FedWEIT`, which creates new parameters in each "
                f"task, but got {', '.join(other_methods)}.",
                hint="Remove the other methods.",
                argument="callbacks",
                value=other_methods,
            )
        federation, model = find_federation(trainer), get_decomposed(pl_module)
        # `needs` requires a federation.
        assert federation is not None
        if not (isinstance(pl_module, Classifier) and pl_module.task_incremental):
            raise InvalidValueError(
                "Expected a `Classifier` with `task_incremental=True` for `FedWEIT`, but got `task_incremental=False`.",
                hint="Pass `task_incremental=True` to `Classifier`.",
                argument="task_incremental",
            )
        stream = find_stream(trainer)
        tasks = stream.plan.task_classes if stream is not None else {}
        num_tasks = max((len(parts) for parts in tasks.values()), default=0) if self.per_task else 1
        if num_tasks > len(model.tasks):
            raise InvalidValueError(
                f"Expected `num_tasks` of `FedWEITNet` to be at least {num_tasks}, the number of tasks that `FedWEIT` "
                f"needs for the stream, but got {len(model.tasks)}.",
                hint=f"Pass `num_tasks={num_tasks}` to `FedWEITNet`.",
                argument="num_tasks",
                value=len(model.tasks),
            )
        reductions = get_reductions(pl_module, federation.settings.rules)
        expected_reductions: dict[str, tuple[str, ...]] = {
            name: ("local",) for name in reductions if name.startswith("model.tasks.")
        }
        base = ("sparse_mean",) if self.sparsity else ("sparse_mean", "mean")
        expected_reductions |= {f"model.net.{name}": base for name in model.names}
        for name, allowed in expected_reductions.items():
            if reductions[name].name not in allowed:
                raise InvalidValueError(
                    f'Expected the reduction of {name} to be "{allowed[0]}" for `FedWEIT`, but got '
                    f'"{reductions[name]}".',
                    hint='Give the strategy `reductions={"model.tasks.*": "local", "model.net.head.*": "local", '
                    '"model.net.body.*weight": "sparse_mean"}`.',
                    argument="reductions",
                    value=name,
                )

    def restore_module(self, module: L.LightningModule) -> None:
        if isinstance(module, Classifier) and isinstance(module.model, FedWEITNet):
            module.model.set_adaptives([])
        self._gates = []


def get_decomposed(module: L.LightningModule) -> FedWEITNet:
    """Return the `FedWEITNet` of a `Classifier`, or raise ValueError."""
    model = module.model if isinstance(module, Classifier) else None
    if not isinstance(model, FedWEITNet):
        network = f" with a model of type `{type(model).__name__}`" if isinstance(module, Classifier) else ""
        raise InvalidValueError(
            f"Expected a `Classifier` of a `FedWEITNet` for `FedWEIT`, but got a `{type(module).__name__}`{network}.",
            hint="Pass `FedWEITNet(net, num_tasks=10)` as the `model` of a `Classifier`.",
            argument="model",
            value=type(model).__name__,
        )
    return model


def kept_mask_units(mask: Tensor, sparsity: float) -> Tensor:
    """Return a mask of the units to upload: all except the share ``sparsity`` with the smallest ``|m|``.

    The number of omitted units is rounded down. The authors' code omits one unit more.
    """
    unit_mask = torch.ones_like(mask, dtype=torch.bool)
    unit_mask[mask.abs().topk(int(sparsity * len(mask)), largest=False).indices] = False
    return unit_mask
