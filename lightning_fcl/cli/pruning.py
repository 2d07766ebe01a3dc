"""Pruning of trials: the values that a trial reports after its rounds, and Optuna's decision to stop the trial."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, TypeAlias

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState

from lightning_fcl.cli.storage import open_storage, storage_errors
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.metrics import METRICS, summarize
from lightning_fcl.evaluation.record import Record, get_quantities, tested_models, truncate_record
from lightning_fcl.library_errors import one_line
from lightning_fcl.validation import did_you_mean

PrunerName: TypeAlias = Literal["none", "median", "percentile", "successive_halving", "hyperband"]
"""Names of Optuna's pruners."""

_PRUNERS: dict[str, type[BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
# Optuna has defaults for all other arguments.
_DEFAULTS: dict[str, dict[str, Any]] = {"percentile": {"percentile": 25.0}}


def make_pruner(name: PrunerName, arguments: Mapping[str, Any]) -> BasePruner:
    """Return one of Optuna's pruners.

    Args:
        name: Name of the pruner.
        arguments: Arguments of the pruner. By default, `percentile` keeps the best 25 % of the trials.

    Raises:
        UnknownNameError: If the pruner has no argument of this name.
        InvalidValueError: If the pruner rejects the arguments.

    Example:
        >>> type(make_pruner("median", {"n_startup_trials": 3})).__name__
        'MedianPruner'
    """
    kind = _PRUNERS[name]
    argument_names = [one for one in signature(kind.__init__).parameters if one not in ("self", "args", "kwargs")]
    if unknown := [one for one in arguments if one not in argument_names]:
        listed_names = ", ".join(argument_names) or "no arguments"
        raise UnknownNameError(
            f"Expected `pruner_args` of the pruner {name} to be among {listed_names}, but got {unknown[0]}.",
            hint=did_you_mean(unknown[0], argument_names) or f"Remove {unknown[0]}.",
            argument="pruner_args",
            value=unknown[0],
        )
    try:
        return kind(**{**_DEFAULTS.get(name, {}), **arguments})
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected `pruner_args` to be arguments of the pruner {name}, but got: {one_line(error)}.",
            hint=f"Correct the value, or remove `pruner_args` to use the defaults of Optuna's {kind.__name__}.",
            argument="pruner_args",
            value=dict(arguments),
        ) from error


def measured_value(record: Record, objective: str, number: int) -> float | None:
    """Return the objective after the first ``number`` rounds, or None if it was not measured in the last of them.

    The metrics of these rounds are those of a run that ends with the experience of the last of these rounds. Values
    that are only measured at the end of a run do not count.

    Args:
        record: Record of the run.
        objective: Name of the metric, as in ``results.json``.
        number: Number of rounds.

    Example:
        >>> rounds = [{"round": r, "experience": {"server": 0}, "correct": {"server": [r]}} for r in range(3)]
        >>> record = {"groups": ["x"], "totals": [10], "tasks": {"server": [[0]]}, "rounds": rounds}
        >>> measured_value(record, "final_accuracy/server", 2), measured_value(record, "final_accuracy/clients", 2)
        (0.1, None)
    """
    name, _, model = objective.rpartition("/")
    rounds = record["rounds"][:number]
    tested = tested_models(rounds[-1])
    is_tested = any(one != "server" for one in tested) if model == "clients" else model == "total" or model in tested
    if not is_tested:
        return None
    tasks = 1 + max(entry["experience"]["server"] for entry in rounds)
    at_end = ("client_state_bytes", "training")
    partial_record = truncate_record(
        {key: value for key, value in record.items() if key not in at_end} | {"rounds": rounds}, tasks
    )
    candidates = [(metric, metric.for_quantity(quantity)) for metric in METRICS for quantity in get_quantities(record)]
    metrics = [
        metric
        for metric, named in candidates
        if named is not None and (named.matches(name) or named.matches(objective))
    ]
    return summarize(partial_record, list(dict.fromkeys(metrics))).get(objective)


@dataclass(frozen=True)
class Pruning:
    """The pruner of a trial, and the trials that the pruner compares the trial with. It can be sent to a worker.

    Without a storage, the pruner compares the trial with the trials of earlier batches. Its decisions then do not
    depend on the number of processes.

    Args:
        objective: Name of the objective.
        direction: Whether larger (``maximize``) or smaller values are better.
        name: Name of the pruner.
        arguments: Arguments of the pruner.
        number: Number of the trial.
        earlier_trials: All trials of earlier batches, in the order of their numbers. Empty if there is a storage.
        storage: Storage of the shared study. None if there is no shared study.
        study_name: Name of the study.
        trial_id: ID of the trial in the storage.
    """

    objective: str
    direction: Literal["maximize", "minimize"]
    name: PrunerName
    arguments: Mapping[str, Any]
    number: int
    earlier_trials: Sequence[FrozenTrial]
    storage: str | None
    study_name: str
    trial_id: int

    def open_trial(self) -> optuna.Trial:
        """Return the trial, to which values are reported."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = make_pruner(self.name, self.arguments)
        if self.storage is not None:
            storage = open_storage(self.storage)
            study = optuna.load_study(study_name=self.study_name, storage=storage, pruner=pruner)
            return optuna.Trial(study, self.trial_id)
        study = optuna.create_study(
            study_name=self.study_name,
            direction=self.direction,
            pruner=pruner,
            sampler=optuna.samplers.RandomSampler(0),
        )
        study.add_trials(self.earlier_trials)
        # The other trials of the batch have no result yet. Hyperband uses the number of the trial.
        for _ in range(len(self.earlier_trials), self.number):
            study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))
        return study.ask()


class TrialReporter:
    """Reports the objective of a trial after each round in which it is measured, and asks the pruner.

    The seeds of a trial run sequentially. A step is the number of rounds that the trial has trained, over all
    its seeds. From the second seed on, the reported value is the mean of the seeds so far after the same round.

    Args:
        pruning: Pruner of the trial.

    Attributes:
        is_pruned: Whether the trial was pruned.
    """

    def __init__(self, pruning: Pruning) -> None:
        self.is_pruned = False
        self._pruning = pruning
        self._trial = pruning.open_trial()
        self._finished_seeds: list[dict[int, float]] = []
        self._values: dict[int, float] = {}
        self._num_rounds, self._offset = 0, 0

    def should_stop(self, record: Record) -> bool:
        """Report the values of new rounds of the current seed, and return whether the trial is pruned."""
        if not record:
            return False
        for number in range(self._num_rounds + 1, len(record["rounds"]) + 1):
            self._num_rounds = number
            value = None if self.is_pruned else measured_value(record, self._pruning.objective, number)
            if value is None:
                continue
            self._values[number] = value
            values = [value, *(seed[number] for seed in self._finished_seeds if number in seed)]
            with storage_errors(self._pruning.storage):
                try:
                    self._trial.report(statistics.fmean(values), self._offset + number)
                    self.is_pruned = self._trial.should_prune()
                except optuna.exceptions.UpdateFinishedTrialError:
                    # Another process has marked this trial as interrupted, and trains it again.
                    self.is_pruned = True
        return self.is_pruned

    def end_seed(self) -> None:
        """Begin with the next seed."""
        self._finished_seeds.append(self._values)
        self._offset += self._num_rounds
        self._values, self._num_rounds = {}, 0

    @property
    def trial(self) -> FrozenTrial:
        """The trial with its reported values, and with the attributes that the pruner has set."""
        with storage_errors(self._pruning.storage):
            return self._trial.storage.get_trial(self._trial._trial_id)
