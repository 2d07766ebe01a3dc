"""What every model of a federation has learnt and forgotten, round by round."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fcl.data.attached import need_stream
from lightning_fcl.data.client_round import ClientRound, current_round
from lightning_fcl.errors import argument, check_fields, one_of
from lightning_fcl.federation.aggregation import entries, load_entries
from lightning_fcl.federation.protocol import FederationView, HasLocalModels, federation_of
from lightning_fcl.methods.functional import evaluating
from lightning_fcl.methods.predicting import predicting
from lightning_fcl.tasks.classification import Classifier

Counts = list[int | None]
"""Correct predictions of each group; None for a group that was not tested."""


@dataclass(eq=False)
class ContinualMetrics(Callback):
    """After each client and each round: tests the model at hand on the stream's common test set.

    The server's model is tested after aggregation. The counts make up ``record``, from which
    `lightning_fcl.evaluation.metrics.summarize` computes every metric; the server's accuracy is logged as
    ``server/accuracy``.

    Args:
        clients: Whose models are tested beside the server's: ``"all"``, ``"none"``, or a list of ids.
        when: When models are tested. ``"trained"``: each round, those that clients have just trained, before
            aggregation, and the server's. ``"aggregated"``: after the last round of an experience, and whether a client
            was drawn for it or not, the model that it would predict with: the server's with the client's own entries,
            made personal by its methods. It is tested on the classes (or domains) of the client's experiences so far,
            unless it is the server's.
        on: The stream's ``"test"`` samples, or its ``"validation"`` samples, on which settings are to be chosen.
        training: Whether the server's last model is also tested on all training samples.
        start: Whether the server's model is also tested before the first round: for streams whose experience 0 is a
            base session.

    Example:
        >>> ContinualMetrics(clients=["client1"]).clients
        ['client1']
    """

    clients: Literal["all", "none"] | list[str] = "all"
    when: Literal["trained", "aggregated"] = argument("trained", one_of, ("trained", "aggregated"))
    on: Literal["test", "validation"] = argument("test", one_of, ("test", "validation"))
    training: bool = False
    start: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.clients, str):
            self.clients = [str(client) for client in self.clients]
        elif self.clients not in ("all", "none"):
            raise ValueError(f'Expected `clients` to be "all", "none" or a list of ids but got "{self.clients}".')
        self.record: dict[str, Any] = {}
        self._current: dict[str, Counts] = {}
        self._test: tuple[Any, Tensor, Tensor] | None = None
        self._started = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the record; a continued fit continues its own.

        Raises:
            ValueError: If the Trainer is no federation's, or the stream has no such samples or clients.
        """
        self._federation(trainer)
        stream = need_stream(trainer)
        plan = stream.plan
        unknown = sorted(set(self.clients) - set(plan.clients)) if not isinstance(self.clients, str) else []
        if unknown:
            raise ValueError(
                f"Expected `clients` of the stream ({', '.join(plan.clients)}) but got {', '.join(unknown)}."
            )
        samples = plan.test if self.on == "test" else plan.validation
        if not len(samples):
            raise ValueError(
                f"Expected the stream's `{self.on}` to be above 0 but got no {self.on} samples to measure on."
            )
        x, y = stream.take(samples)[:2]
        self._current = {}
        groups = torch.from_numpy(plan.groups[samples])
        self._test = (x.to(pl_module.device), y.to(pl_module.device), groups.to(pl_module.device))
        names = stream.group_names
        tasks: dict[str, list[list[int]]] = {client: [list(t) for t in parts] for client, parts in plan.tasks.items()}
        longest = max(len(parts) for parts in tasks.values())
        tasks["server"] = [
            sorted({group for parts in plan.tasks.values() for group in parts[min(e, len(parts) - 1)]})
            for e in range(longest)
        ]
        if not self.record or trainer.current_epoch == 0:
            self.record = {
                "groups": names,
                "totals": torch.bincount(groups, minlength=len(names)).tolist(),
                "tasks": tasks,
                "rounds": [],
            }
            if self.start:
                self.record["start"] = self._count(pl_module)
        self._started = time.monotonic()

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        """Test a client's model."""
        predicts = pl_module.local_models if isinstance(pl_module, HasLocalModels) else True
        if predicts and self.when == "trained" and self._tests(client_round.client):
            self._current[client_round.client] = self._count(pl_module)

    @staticmethod
    def _federation(trainer: L.Trainer) -> FederationView:
        """The Trainer's federation.

        Raises:
            ValueError: If it runs none.
        """
        federation = federation_of(trainer)
        if federation is None:
            raise ValueError(
                'Expected a Trainer with `strategy="federated"` for `ContinualMetrics` but got a plain one, which has '
                "no rounds. Log metrics in the module's `validation_step`."
            )
        return federation

    def _tests(self, client: str) -> bool:
        return self.clients == "all" or (self.clients != "none" and client in self.clients)

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Test the server's model and close the round's entry."""
        federation = self._federation(trainer)
        plan, happened = federation.plan, federation.record
        adapting = isinstance(pl_module, HasLocalModels) and pl_module.adapting  # its readout waits for a later round
        correct, self._current = self._current, {}
        if self.when == "aggregated":
            correct = self._aggregated(trainer, pl_module)
        elif not adapting:
            correct = {**correct, "server": self._count(pl_module)}
        experiences = {client: plan.experiences[client][trainer.current_epoch] for client in plan.clients}
        now = time.monotonic()
        self.record["rounds"].append(
            {
                "round": trainer.current_epoch,
                "experience": {**experiences, "server": max(experiences.values())},
                "correct": correct,
                "upload_bytes": dict(happened.upload_bytes),
                "download_bytes": dict(happened.download_bytes),
                "dropped": dict(happened.dropped),
                "skipped": list(happened.skipped),
                "missed": list(happened.missed),
                "master": happened.master,
                "seconds": now - self._started,
            }
        )
        self._started = now
        total = sum(self.record["totals"])
        whole = {name: [count for count in counts if count is not None] for name, counts in correct.items()}
        values = {f"{n}/accuracy": sum(counts) / total for n, counts in whole.items() if len(counts) == len(correct[n])}
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def _aggregated(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Counts]:
        """Test the models with which the clients go on whose experience ends with this round."""
        federation, round = self._federation(trainer), current_round(trainer)
        stream = need_stream(trainer)
        client_rounds = [stream.client_round(client, round) for client in filter(self._tests, stream.plan.clients)]
        ending = [client_round for client_round in client_rounds if client_round.last_round]
        if not ending:
            return {}
        received = {name: value.detach().clone() for name, value in entries(module).items()}
        counts: dict[str, Counts] = {"server": self._count(module)}
        for client_round in ending:
            state = federation.client_state(client_round.client, received)
            if state is received:
                counts[client_round.client] = counts["server"]  # all predict with the same model
                continue
            load_entries(module, state)
            seen = stream.plan.tasks[client_round.client][: client_round.experience + 1]
            counts[client_round.client] = self._count(module, sorted({group for groups in seen for group in groups}))
        load_entries(module, received)
        return counts

    def _count(self, module: L.LightningModule, groups: list[int] | None = None) -> Counts:
        """Correct predictions of each group on the test set, or of some groups and None for others.

        A model that predicts every time step has more of them.
        """
        assert self._test is not None
        number, test = len(self.record["groups"]), self._test
        if groups is None:
            correct, steps = _correct(module, *test, number)
            self.record["totals"] = (torch.bincount(test[2], minlength=number) * steps).tolist()
            return correct
        rows = torch.isin(test[2], torch.tensor(groups, device=test[2].device))
        x, y, of = (part[rows] for part in test)
        correct, _ = _correct(module, x, y, of, number)
        return [count if group in groups else None for group, count in enumerate(correct)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Test the server's last model on what the clients have learnt from."""
        if self.training:
            stream = need_stream(trainer)
            seen = np.unique(np.concatenate([rows for current in stream.plan.train for rows in current.values()]))
            x, y = (part.to(pl_module.device) for part in stream.take(seen)[:2])
            correct, steps = _correct(pl_module, x, y, torch.zeros_like(y), 1)
            self.record["training"] = {"correct": correct[0], "total": len(y) * steps}

    def state_dict(self) -> dict[str, Any]:
        """The record so far."""
        return {"record": self.record}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue an earlier record."""
        self.record = state_dict["record"]


@torch.no_grad()
def _correct(module: L.LightningModule, x: Any, y: Tensor, group: Tensor, groups: int) -> tuple[Counts, int]:
    """A model's correct predictions in each group of samples, and how many predictions it makes for each sample."""
    counts, steps = torch.zeros(groups, dtype=torch.long, device=module.device), 1
    precision = module.trainer.precision_plugin
    with evaluating(module), precision.forward_context(), predicting(module):
        for part, label, where in zip(*(torch.split(values, 512) for values in (x, y, group)), strict=True):
            part = precision.convert_input(part)
            if isinstance(module, Classifier):
                output = module.mask_logits(module.outputs_by_task(part, label), label)
            else:
                output = module(part)
            prediction = output.argmax(dim=-1)
            if prediction.dim() > 1:
                steps = prediction.shape[1]
                label, where = (values[:, None].expand_as(prediction).flatten() for values in (label, where))
            counts += torch.bincount(where[prediction.flatten() == label], minlength=groups)
    correct: Counts = counts.tolist()
    return correct, steps
