"""Tests of the server's model and the clients' models during a fit, recorded for metrics such as forgetting."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks.client_models import ClientSelection, check_selection, is_selected, iterate_client_models
from lightning_fcl.callbacks.client_values import log_round
from lightning_fcl.callbacks.evaluator import Counts, Evaluator, Values, evaluation_groups, samples_of_split
from lightning_fcl.callbacks.round_clock import RoundClock
from lightning_fcl.callbacks.run_tracking import log_final_metrics, log_method
from lightning_fcl.callbacks.step_evaluator import StepEvaluator, is_evaluated_by_step
from lightning_fcl.callbacks.stream_description import describe_plan
from lightning_fcl.callbacks.weight_averaging import averaged_weights
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import Plan
from lightning_fcl.data.trainer_access import get_callbacks, require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.confusion import Confusion, recorded_models
from lightning_fcl.evaluation.continual import group_name
from lightning_fcl.evaluation.record import ACCURACY, server_first, truncate_record
from lightning_fcl.evaluation.sample_bits import encode_bits
from lightning_fcl.federation.aggregation import load_state_tensors, state_tensors
from lightning_fcl.federation.protocols import HasLocalModels, HasMetrics, find_federation, get_ranks
from lightning_fcl.federation.ranks import SINGLE_RANK, gather_by_client
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.methods.base import methods_overriding
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.driver import MethodDriver
from lightning_fcl.validation import check_clients, one_of, validate_fields, validated

T = TypeVar("T")

_ALWAYS = ("upload_bytes", "download_bytes", "dropped", "no_data", "missed_sync", "diverged", "master")


@dataclass(frozen=True)
class _ModelTest:
    """The results of a model, and its confusion matrix and its correct predictions (as text) if they are recorded."""

    results: Counts | Values
    confusion: Confusion | None = None
    hits: str | None = None


@dataclass(eq=False)
class ContinualMetrics(Callback):
    """Callback that tests the models of a federation on the stream's common test set, and records the results.

    The server's model is tested after aggregation. With `ServerWeightAveraging`, its average is tested instead. For
    modules that are measured by accuracy, ``record`` contains the number of correct predictions for each group of test
    samples (a class or a domain).
    `lightning_fcl.evaluation.metrics.summarize` computes every metric from ``record``. The server's accuracy is logged
    as ``server/accuracy``. In a plain Trainer, each epoch is a round, and the only model is ``"server"``.

    The measure depends on the module:

    - A module with ``configure_metrics()``, such as `Regressor`, is measured by these metrics instead of accuracy. The
      name of a logged value is for example ``server/MSE``. Reports show the first metric in curves and matrices.
    - A custom LightningModule whose `forward` does not return logits of the classes is measured by the values that its
      `test_step` logs. If the module has no `test_step`, the values that its `validation_step` logs are used.

    For modules that are measured by accuracy, ``record`` also contains a confusion matrix of the server's model and of
    each tested client for each experience. The matrix is that of the last test in the experience.
    `lightning_fcl.evaluation.Run.confusion` returns the matrices as a table. All matrices of the clients together have
    at most 500,000 entries. For example, with 100 classes, 10,000 test samples and 10 experiences, the record contains
    the matrices of the first 5 tested clients. Use ``clients`` to select other clients. With ``when="both"``, the tests
    before aggregation have no matrices.

    When the fit of a federation ends, the size of each client's state between rounds, in bytes, is recorded as
    ``client_state_bytes``. The size includes client-local tensors, the state of methods and of an optimizer, and
    residuals of compressed uploads.

    Args:
        clients: Clients whose models are tested in addition to the server's: ``"all"``, ``"none"``, or a list of ids.
        when: When models are tested.

            - ``"trained"``: in each round. Tests each client's model after local training, before aggregation, and the
              server's model after aggregation.
            - ``"aggregated"``: after the last round of an experience. Tests the server's model, and the model that each
              client would predict with. This model is the server's model with the client-local parameters. Methods can
              personalize this model further. A client's model that differs from the server's model is tested on the
              classes (or domains) of the client's current and earlier experiences.
            - ``"both"``: as ``"aggregated"``. In addition, tests each client's model before aggregation, after its last
              local training of an experience, on the same classes. Metrics such as ``average_accuracy_local`` need
              these tests.
        classes: Classes that the models can predict:

            - ``"seen"``: the classes of all clients' experiences up to the round of the test. Outputs of other classes
              are ignored, as if the classifier grew with each experience.
            - ``"all"``: all classes, including classes of later experiences.

            If the test groups are domains, or the module is a task-incremental `Classifier`, both values have the same
            results. Values that the module's own step logs do not depend on ``classes``.
        split: ``"test"`` for the stream's test samples, or ``"validation"`` for its validation samples. Use the
            validation samples to choose hyperparameters.
        server_each_round: Whether the server's model is tested after each round, also with ``when="aggregated"`` or
            ``"both"``. Metrics such as ``anytime_accuracy`` then include the rounds within an experience.
        evaluate_on_train: Whether the server's final model is also tested on all training samples.
        evaluate_before_fit: Whether the server's model is also tested before the first round. Use this option for
            streams whose experience 0 is a base session.
        lower_is_better: Names of the values logged by the module's own step for which lower is better. Default: names
            that contain "loss" or "error". If the step logs a metric object, the ``higher_is_better`` attribute of the
            object is used instead.

    Example:
        >>> ContinualMetrics(clients=["client1"]).clients
        ['client1']
    """

    clients: ClientSelection = "all"
    when: Literal["trained", "aggregated", "both"] = validated("trained", one_of, ("trained", "aggregated", "both"))
    classes: Literal["seen", "all"] = validated("seen", one_of, ("seen", "all"))
    split: Literal["test", "validation"] = validated("test", one_of, ("test", "validation"))
    server_each_round: bool = False
    evaluate_on_train: bool = False
    evaluate_before_fit: bool = False
    lower_is_better: list[str] | None = None

    def __post_init__(self) -> None:
        check_selection(self.clients)
        validate_fields(self)
        if not isinstance(self.clients, str):
            self.clients = [str(client) for client in self.clients]
        self.record: dict[str, Any] = {}
        self.first_tasks: int | None = None  # number of tasks that count for the final metrics. None: all tasks
        self._current: dict[str, _ModelTest] = {}
        # With `when="both"`: results of the clients that ended an experience in the current round, before aggregation.
        self._own: dict[str, Counts | Values] = {}
        # For each later round, the clients that are expected to train in that round.
        self._drawn: dict[int, set[str]] = {}
        # The experience of a client in each round. Clients that share one sequence object have one entry.
        self._ways: list[tuple[int, ...]] = []
        self._test: Evaluator | StepEvaluator | None = None
        # Models whose confusion matrices are recorded, the server first.
        self._confusion_models: list[str] = []
        # Confusion matrices of the models' last tests in their current experiences.
        self._unfinished: dict[str, Confusion] = {}
        self._clock = RoundClock()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream = require_stream(trainer)
        plan = stream.plan
        if not isinstance(self.clients, str):
            check_clients("`clients`", self.clients, plan.clients)
        if find_federation(trainer) is None:
            self._check_order(trainer)
        samples = samples_of_split(stream, self.split, type(self).__name__)
        self._current, self._own, self._drawn = {}, {}, {}
        self._ways = [*{id(numbers): numbers for numbers in plan.experiences.values()}.values()]
        by_step = is_evaluated_by_step(pl_module, stream, samples)
        if self.lower_is_better and not by_step:
            raise InvalidValueError(
                f"Expected no `lower_is_better`, because `{type(pl_module).__name__}` is not measured by its own step, "
                f"but got {', '.join(self.lower_is_better)}.",
                hint="Leave `lower_is_better` out.",
                argument="lower_is_better",
                value=self.lower_is_better,
            )
        self._test = (StepEvaluator if by_step else Evaluator).from_stream(stream, samples, pl_module.device)
        tested = [] if find_federation(trainer) is None else [*filter(self._tests, plan.clients)]
        if not self.record or trainer.current_epoch == 0:
            names, sizes = stream.plan.group_names(stream.classes), self._test.count_samples()
            description = describe_plan(plan, pl_module, tested)
            self.record = {"groups": names, "totals": sizes, **description, "rounds": []}
            self._unfinished = {}
            federation = find_federation(trainer)
            if federation is not None and (privacy := federation.privacy_summary) is not None:
                self.record["privacy"] = privacy
            if measures := self._test.describe_metrics(pl_module, self.lower_is_better):
                self.record["measures"] = measures
            else:
                self.record["classes"] = list(stream.classes)
            if self.evaluate_before_fit:
                self.record["start"] = self._evaluate(pl_module, "server", before_fit=True).results
        self._confusion_models = (
            []
            if "measures" in self.record
            else recorded_models(
                tested, stream.num_classes, len(samples), num_experiences=len(self.record["tasks"]["server"])
            )
        )
        self._clock.start()
        log_method(trainer)

    def _check_order(self, trainer: L.Trainer) -> None:
        """Raise ValueError if a method that changes predictions ends its epoch after this callback."""
        callbacks = get_callbacks(trainer)
        later_callbacks = callbacks[callbacks.index(self) :]
        ruling = [type(method).__name__ for method in methods_overriding(get_methods(trainer), "rescore")]
        if ruling and any(isinstance(callback, MethodDriver) for callback in later_callbacks):
            raise InvalidValueError(
                f"Expected `ContinualMetrics` after `{ruling[0]}` among the callbacks of a plain Trainer, but got it "
                f"before `{ruling[0]}`. At the end of each epoch, `{ruling[0]}` updates the state with which it "
                "predicts.",
                hint=f"Put `ContinualMetrics` after `{ruling[0]}` in `callbacks`.",
                argument="callbacks",
                value=ruling[0],
            )

    def needs_client_state(self, pl_module: L.LightningModule) -> bool:
        predicts = pl_module.client_state_predicts if isinstance(pl_module, HasLocalModels) else True
        return predicts and self.when != "aggregated" and self.clients != "none"

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        if self.needs_client_state(pl_module) and self._tests(client_round.client_id):
            with self._clock.testing():
                self._evaluate_trained(trainer, pl_module, client_round)

    def _evaluate_trained(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        """Test the model of a client after its local training, if ``when`` requires this."""
        if self.when == "trained":
            self._current[client_round.client_id] = self._evaluate(pl_module, client_round.client_id)
        elif self._was_last(trainer, client_round):
            trained = {name: value.detach().clone() for name, value in state_tensors(pl_module).items()}
            federation = find_federation(trainer)
            # Only a federation calls `on_client_end`.
            assert federation is not None
            state = federation.client_state_dict(client_round.client_id, trained)
            load_state_tensors(pl_module, state)
            self._own[client_round.client_id] = self._evaluate_seen(trainer, pl_module, client_round).results
            load_state_tensors(pl_module, trained)

    def _was_last(self, trainer: L.Trainer, client_round: ClientRound) -> bool:
        """Return whether the client is not expected to train in a later round of its experience."""
        federation = find_federation(trainer)
        assert federation is not None
        experiences = federation.stream.plan.experiences[client_round.client_id]
        for round_idx in range(client_round.round_idx + 1, len(experiences)):
            if experiences[round_idx] != client_round.experience_idx:
                continue
            if round_idx not in self._drawn:
                self._drawn[round_idx] = set(
                    federation.participation.expected_clients(federation.stream.plan, round_idx)
                )
            if client_round.client_id in self._drawn[round_idx]:
                return False
        return True

    def _tests(self, client: str) -> bool:
        return is_selected(client, self.clients)

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        # With `when="trained"`, the server is not tested while the reservoir adapts, because the readout is solved in a
        # later round.
        adapting = isinstance(pl_module, HasLocalModels) and pl_module.is_adapting
        with averaged_weights(trainer, pl_module), self._clock.testing():
            if self.when != "trained":
                tests = self._aggregated(trainer, pl_module)
            else:
                tests, self._current = self._gathered(trainer, self._current), {}
                if not adapting:
                    tests = {**tests, "server": self._evaluate(pl_module, "server")}
        tested = {model: test.results for model, test in tests.items()}
        hits = {model: test.hits for model, test in tests.items() if test.hits is not None}
        happened = vars(federation.server.record if federation is not None else RoundRecord())
        epsilon = federation.epsilon if federation is not None else None
        record_names = [*_ALWAYS, *(name for name in ("duplicate_claims", "upload_limits") if happened[name])]
        record_names += (
            [] if happened["simulated_seconds"] is None else ["simulated_seconds", "late_clients", "staleness"]
        )
        if happened["train_samples"]:
            record_names.append("train_samples")
        self.record["rounds"].append(
            {
                "round": trainer.current_epoch,
                "experience": self._experiences(require_stream(trainer).plan, trainer.current_epoch),
                **({"values": tested} if "measures" in self.record else {"correct": tested}),
                **({"local": self._gathered(trainer, self._own)} if self.when == "both" else {}),
                **self._confusion_entry(require_stream(trainer).plan, trainer.current_epoch, tests),
                **({"correct_samples": hits} if hits else {}),
                **{name: copy.copy(happened[name]) for name in record_names},
                **({} if epsilon is None else {"epsilon": epsilon}),
                **self._clock.end_round(get_ranks(trainer)),
            }
        )
        self._own, self._drawn = {}, {}
        values = {model: self._overall_values(found) for model, found in tested.items()}
        log_round(trainer, pl_module, values, self.record["rounds"][-1]["experience"]["server"])

    def _confusion_entry(self, plan: Plan, round_idx: int, tests: Mapping[str, _ModelTest]) -> dict[str, Any]:
        """Return the entry of a round with the confusion matrices of models whose experience ends, or {} if none ends.

        The last matrices of other models are kept until their experiences end, or until the fit ends.
        """
        matrices = {model: tests[model].confusion for model in self._confusion_models if model in tests}
        self._unfinished.update({model: matrix for model, matrix in matrices.items() if matrix is not None})
        self.record.pop("confusion", None)
        models = [model for model in server_first(self._unfinished) if self._is_last_round(plan, round_idx, model)]
        return {"confusion": {model: self._unfinished.pop(model) for model in models}} if models else {}

    def _is_last_round(self, plan: Plan, round_idx: int, model: str) -> bool:
        """Return whether a round is the last one of a model's experience."""
        sequences = self._ways if model == "server" else [plan.experiences[model]]
        rounds = range(round_idx, min(round_idx + 2, plan.num_rounds))
        current, *following = (max(numbers[r] for numbers in sequences) for r in rounds)
        return following != [current]

    def _gathered(self, trainer: L.Trainer, local_values: Mapping[str, T]) -> dict[str, T]:
        """Return the values of all clients, gathered from the processes that store the client states."""
        return gather_by_client(get_ranks(trainer), local_values, require_stream(trainer).plan.clients)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if find_federation(trainer) is None:
            self.on_round_end(trainer, pl_module)

    def _experiences(self, plan: Plan, round_idx: int) -> dict[str, int]:
        """Return the experience of each client and of the server in a round, by name.

        The server has the largest experience of all clients. If the experiences are those of the previous round, return
        the dict of the previous round, to save memory.
        """
        if self.record["rounds"] and all(numbers[round_idx] == numbers[round_idx - 1] for numbers in self._ways):
            previous_experiences: dict[str, int] = self.record["rounds"][-1]["experience"]
            return previous_experiences
        experiences = {client: numbers[round_idx] for client, numbers in plan.experiences.items()}
        return {**experiences, "server": max(experiences.values())}

    def _overall_values(self, results: Counts | Values) -> dict[str, float]:
        if isinstance(results, dict):
            all_groups_name = group_name(range(len(self.record["groups"])))
            whole = {name: parts.get(all_groups_name) for name, parts in results.items()}
            return {name: value for name, value in whole.items() if value is not None}
        counts = [count for count in results if count is not None]
        return {ACCURACY.name: sum(counts) / sum(self.record["totals"])} if len(counts) == len(results) else {}

    def _aggregated(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, _ModelTest]:
        """Return the results of the server, and of the tested clients whose experience ends with this round.

        If no experience of a tested client ends, return {}, or the results of the server with ``server_each_round``.
        With ``clients="none"``, the experiences of all clients count.
        """
        federation, round_idx = find_federation(trainer), trainer.current_epoch
        stream = require_stream(trainer)
        candidate_clients = stream.plan.clients if self.clients == "none" else filter(self._tests, stream.plan.clients)
        ending = [
            part
            for part in (stream.client_round(client, round_idx) for client in candidate_clients)
            if part.is_last_round
        ]
        if not ending:
            return {"server": self._evaluate(module, "server")} if self.server_each_round else {}
        server = self._evaluate(module, "server")
        if federation is None or self.clients == "none":
            return {"server": server}
        rounds = {client_round.client_id: client_round for client_round in ending}
        tests = {
            client: server if is_server_model else self._evaluate_seen(trainer, module, rounds[client])
            for client, is_server_model in iterate_client_models(federation, module, rounds)
        }
        return {"server": server, **self._gathered(trainer, tests)}

    def _evaluate_seen(self, trainer: L.Trainer, module: L.LightningModule, client_round: ClientRound) -> _ModelTest:
        """Return the results of a client's model on the groups of its current and earlier experiences."""
        client = client_round.client_id
        seen_tasks = require_stream(trainer).plan.tasks[client][: client_round.experience_idx + 1]
        return self._evaluate(module, client, sorted({group for groups in seen_tasks for group in groups}))

    def _evaluate(
        self, module: L.LightningModule, model: str, groups: list[int] | None = None, before_fit: bool = False
    ) -> _ModelTest:
        """Return the results of a model on the test set, or only on some groups. Untested groups have no result."""
        assert self._test is not None
        round_idx = None if before_fit else module.trainer.current_epoch
        number, test = len(self.record["groups"]), self._among_classes(self._test, round_idx)
        if "measures" in self.record:
            parts = evaluation_groups(self.record["tasks"][model], number)
            tested = set(range(number) if groups is None else groups)
            return _ModelTest(test.evaluate(module, [part for part in parts if tested.issuperset(part)], self._names()))
        assert isinstance(test, Evaluator)
        with_confusion = model in self._confusion_models
        if groups is None:
            ranks = get_ranks(module.trainer) if model == "server" else SINGLE_RANK
            plan = require_stream(module.trainer).plan
            with_hits = model == "server" and round_idx is not None and self._is_last_round(plan, round_idx, model)
            counts = test.count(module, ranks, with_confusion, with_hits)
            self.record["totals"] = test.count_samples(counts.steps)
            return _ModelTest(
                counts.correct, counts.confusion, None if counts.hits is None else encode_bits(counts.hits)
            )
        counts = test.subset(groups).count(module, SINGLE_RANK, with_confusion)
        correct = [count if group in groups else None for group, count in enumerate(counts.correct)]
        return _ModelTest(correct, counts.confusion)

    def _among_classes(self, test: Evaluator | StepEvaluator, round_idx: int | None) -> Evaluator | StepEvaluator:
        """Return the evaluator for the classes that models can predict in a round. None: before the first round."""
        if isinstance(test, Evaluator) and self.classes == "seen":
            return test.among_seen_classes(round_idx)
        return test

    def _names(self) -> list[str]:
        return [one["name"] for one in self.record["measures"]]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (federation := find_federation(trainer)) is not None:
            local_clients = [client for client in federation.stream.plan.clients if federation.hosts(client)]
            server = federation.server
            nbytes_by_client = {
                client: server.client_store.nbytes(client) + server.sent_once.kept_bytes(client)
                for client in local_clients
            }
            self.record["client_state_bytes"] = self._gathered(trainer, nbytes_by_client)
        if self._unfinished:
            self.record["confusion"] = self._unfinished
        if self.evaluate_on_train:
            with averaged_weights(trainer, pl_module):
                self.record["training"] = self._evaluate_on_train(trainer, pl_module)

    def _evaluate_on_train(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Values | dict[str, int | None]:
        stream = require_stream(trainer)
        seen_rows = np.unique(np.concatenate([rows for current in stream.plan.train for rows in current.values()]))
        by_step = "measures" in self.record and not isinstance(pl_module, HasMetrics)
        learnt = (StepEvaluator if by_step else Evaluator).from_stream(
            stream, seen_rows, pl_module.device, is_stackable=True
        )
        learnt = self._among_classes(learnt, self.record["rounds"][-1]["round"])
        if "measures" in self.record:
            return learnt.evaluate(pl_module, [(0,)], self._names())
        assert isinstance(learnt, Evaluator)
        counts = learnt.count(pl_module, get_ranks(trainer))
        return {"correct": counts.correct[0], "total": learnt.count_samples(counts.steps)[0]}

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if find_federation(trainer) is None and self.record and "training" not in self.record:
            self.on_train_end(trainer, pl_module)
        if self.record.get("rounds"):
            log_final_metrics(trainer, self.final_record)

    @property
    def final_record(self) -> dict[str, Any]:
        """The record of the tasks that count for the final metrics."""
        return truncate_record(self.record, self.first_tasks) if self.first_tasks else self.record

    def state_dict(self) -> dict[str, Any]:
        unfinished = {
            model: torch.tensor(matrix, dtype=torch.int32).reshape(-1, 3) for model, matrix in self._unfinished.items()
        }
        return {"record": self.record, "confusion": unfinished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.record = state_dict["record"]
        self._unfinished = {model: matrix.tolist() for model, matrix in state_dict["confusion"].items()}
