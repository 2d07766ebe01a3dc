"""The Optuna study of a search: which trials are left, their settings, and their results.

Each trial has a slot, a number from 0 to the number of trials minus 1. A slot is taken if one of its trials is running
or has ended with a result or a failure. Processes that share a study claim free slots, so that together they run the
requested number of trials. The trial of an interrupted process frees its slot.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from lightning_fcl import __version__
from lightning_fcl.cli.jobs import Failure, Job
from lightning_fcl.cli.pruning import Pruning, make_pruner
from lightning_fcl.cli.search import Search
from lightning_fcl.cli.storage import open_storage, storage_errors, without_password
from lightning_fcl.errors import InvalidStateError

RESULTS = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials with a value."""

_SEARCH = "lightning_fcl_search"
_HEARTBEAT_SECONDS = 30
# A running trial without a heartbeat for this time is interrupted. The clocks of machines may differ by minutes.
_GRACE_SECONDS = 300


@dataclass
class SearchStudy:
    """The study of a search, in memory or in a storage that other processes share.

    Args:
        search: The search.
        number: Number of trials.
        seed: Seed of the sampler.
        grid: Points of the grid. Empty for other samplers.
        name: Name of the study.
        storage_text: URL or file of the storage. None for a study in memory.
    """

    search: Search
    number: int
    seed: int
    grid: Sequence[Mapping[str, Any]]
    name: str
    storage_text: str | None
    storage: BaseStorage = field(init=False)
    study: optuna.Study = field(init=False)
    _claimed: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.storage = InMemoryStorage() if self.storage_text is None else open_storage(self.storage_text)
        with storage_errors(self.storage_text):
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=self.name,
                direction=self.search.direction,
                pruner=make_pruner(self.search.pruner, self.search.pruner_args),
                sampler=optuna.samplers.RandomSampler(0),
                load_if_exists=True,
            )

    def delete(self) -> None:
        """Delete all trials of the study."""
        with storage_errors(self.storage_text):
            optuna.delete_study(study_name=self.name, storage=self.storage)
        self.__post_init__()

    def check_search(self) -> None:
        """Raise InvalidStateError if the study belongs to another search. Otherwise, mark it as a study of this search.

        The search includes the recipes, the objective, the space, the seeds and the version of this library. The number
        of trials, the pruner and the seed of the sampler may differ.
        """
        expected = _describe(self.search)
        with storage_errors(self.storage_text):
            actual = self.study.user_attrs.get(_SEARCH)
            if actual is None and not self.study.get_trials(deepcopy=False):
                self.study.set_user_attr(_SEARCH, expected)
                self.study.set_user_attr("objective", self.search.objective)
                actual = self.study.user_attrs[_SEARCH]
        if actual == expected:
            return
        differing = [name for name in expected if not isinstance(actual, dict) or actual.get(name) != expected[name]]
        difference = (
            f"has another {', '.join(differing)}" if isinstance(actual, dict) else "was not made by this command"
        )
        raise InvalidStateError(
            f"Expected the study {self.name} in {without_password(self.storage_text or '')} to belong to this search, "
            f"but the study {difference}.",
            hint="Use another name with `--study-name`, or delete the study and its trials with `--restart`.",
            argument="--study-name",
            value=self.name,
        )

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials that take a slot, in the order of their numbers.

        Args:
            states: States of the trials. Default: all states.
        """
        with storage_errors(self.storage_text):
            trials = self.study.get_trials(deepcopy=False, states=states or None)
        return [trial for trial in trials if _takes_slot(trial)]

    @property
    def ended_trials(self) -> list[FrozenTrial]:
        """Trials with a result or a failure."""
        return self.trials(*RESULTS, TrialState.FAIL)

    @property
    def best_trial(self) -> FrozenTrial | None:
        """Completed trial with the best value. None if no trial is completed."""
        completed = self.trials(TrialState.COMPLETE)
        if not completed:
            return None
        sign = 1 if self.search.direction == "minimize" else -1
        return min(completed, key=lambda trial: sign * (trial.value or 0.0))

    def claim(self) -> optuna.Trial | None:
        """Return a new trial of a free slot with its settings, or None if no slot is free.

        With random search, the settings depend only on the seed and the slot. With TPE, they also depend on the other
        trials. With a grid, the settings are the point of the grid with the number of the slot. A trial that replaces
        an interrupted trial has the settings of the interrupted trial.
        """
        with storage_errors(self.storage_text):
            while True:
                self._free_stale_slots()
                all_trials = self.study.get_trials(deepcopy=False)
                taken_slots = {trial.user_attrs["slot"] for trial in all_trials if _takes_slot(trial)}
                slot = next((slot for slot in range(self.number) if slot not in taken_slots), None)
                if slot is None:
                    return None
                seeds = [*range(self.search.first_seed, self.search.first_seed + self.search.seeds)]
                attributes = {"slot": slot, "folder": f"trial-{slot:04}", "seeds": seeds, "heartbeat": time.time()}
                template = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
                study_id = self.storage.get_study_id_from_name(self.name)
                trial_id = self.storage.create_new_trial(study_id, template)
                number = self.storage.get_trial_number_from_id(trial_id)
                # Two processes can create a trial of the same slot at the same time. The first trial takes the slot.
                earlier_trials = (trial for trial in self.trials() if trial.number < number)
                if not any(trial.user_attrs["slot"] == slot for trial in earlier_trials):
                    break
                self.storage.set_trial_state_values(trial_id, TrialState.FAIL)
            self._claimed.add(trial_id)
            interrupted = [
                trial.params
                for trial in all_trials
                if trial.user_attrs.get("slot") == slot and {*trial.params} == {*self.search.space}
            ]
            # A study caches the trials that its sampler reads, so each trial needs a new object.
            sampler = self._sampler(slot, interrupted[-1] if interrupted else None)
            study = optuna.load_study(
                study_name=self.name, storage=self.storage, sampler=sampler, pruner=self.study.pruner
            )
            trial = optuna.Trial(study, trial_id)
            for name, distribution in self.search.distributions.items():
                _suggest(trial, name, distribution)
            return trial

    def _sampler(self, slot: int, params: Mapping[str, Any] | None) -> optuna.samplers.BaseSampler:
        draw = int(np.random.SeedSequence([self.seed, slot]).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(draw)
            if self.search.sampler == "tpe":
                sampler = optuna.samplers.TPESampler(seed=draw, constant_liar=True)
            fixed = params if params is not None else self.grid[slot] if self.grid else None
            return sampler if fixed is None else optuna.samplers.PartialFixedSampler(dict(fixed), sampler)

    def pruning(self, trial: optuna.Trial, earlier_trials: Sequence[FrozenTrial]) -> Pruning | None:
        """Return the pruning of a trial, or None if the search has no pruner."""
        if self.search.pruner == "none":
            return None
        direction = self.search.direction
        assert direction is not None  # The search file or the metric defines the direction.
        return Pruning(
            self.search.objective,
            direction,
            self.search.pruner,
            self.search.pruner_args,
            trial.number,
            earlier_trials if self.storage_text is None else (),
            self.storage_text,
            self.name,
            trial._trial_id,
        )

    def tell(
        self, trial: optuna.Trial, state: TrialState, value: float | None = None, reported: FrozenTrial | None = None
    ) -> None:
        """Store the end of a trial.

        If another process has marked the trial as interrupted in the meantime, nothing is stored.

        Args:
            trial: The trial.
            state: State of the trial.
            value: Value of the objective. None if the trial failed.
            reported: The trial with the values that it reported. None if the trial reported no values, or if they are
                in the storage.
        """
        trial_id = trial._trial_id
        with storage_errors(self.storage_text), suppress(optuna.exceptions.UpdateFinishedTrialError):
            if reported is not None and self.storage_text is None:
                for step, step_value in reported.intermediate_values.items():
                    self.storage.set_trial_intermediate_value(trial_id, step, step_value)
                for name, attribute in reported.system_attrs.items():
                    self.storage.set_trial_system_attr(trial_id, name, attribute)
            self.storage.set_trial_state_values(trial_id, state, None if value is None else [value])
        self._claimed.discard(trial_id)

    def tell_failure(self, trial: optuna.Trial, failure: Failure) -> None:
        """Store the failure of a trial."""
        with storage_errors(self.storage_text), suppress(optuna.exceptions.UpdateFinishedTrialError):
            for name, text in (("failure", failure.message), ("error", failure.error), ("code", failure.code)):
                trial.set_user_attr(name, text)
        self.tell(trial, TrialState.FAIL)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send heartbeats of the claimed trials during the block. After it, free the slots of unfinished trials."""
        end_event = threading.Event()

        def send_heartbeats() -> None:
            while not end_event.wait(_HEARTBEAT_SECONDS):
                for trial_id in [*self._claimed]:
                    with suppress(Exception):  # The next heartbeat follows. A finished trial needs none.
                        self.storage.set_trial_user_attr(trial_id, "heartbeat", time.time())

        thread = threading.Thread(target=send_heartbeats, daemon=True)
        if self.storage_text is not None:
            thread.start()
        try:
            yield
        finally:
            end_event.set()
            if thread.is_alive():
                thread.join()
            for trial_id in [*self._claimed]:
                with suppress(Exception):  # Without a connection, the missing heartbeats free the slot.
                    self.storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _free_stale_slots(self) -> None:
        """Mark the running trials as failed whose process has sent no heartbeat for a long time."""
        for trial in self.trials(TrialState.RUNNING) if self.storage_text is not None else ():
            is_stale = time.time() - trial.user_attrs["heartbeat"] > _GRACE_SECONDS
            if is_stale and trial._trial_id not in self._claimed:
                with suppress(optuna.exceptions.UpdateFinishedTrialError):
                    self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def failure_of(trial: FrozenTrial) -> Failure | None:
    """Return the failure of a trial, or None if the trial has not failed."""
    if trial.state is not TrialState.FAIL:
        return None
    return Failure(*(str(trial.user_attrs.get(name, "")) for name in ("failure", "error", "code")))


def _takes_slot(trial: FrozenTrial) -> bool:
    """Return whether a trial takes its slot. An interrupted trial is stored as a failed trial without a failure."""
    return "slot" in trial.user_attrs and (trial.state is not TrialState.FAIL or "failure" in trial.user_attrs)


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> None:
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
    else:
        assert isinstance(distribution, FloatDistribution)
        trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _describe(search: Search) -> dict[str, Any]:
    """Return the parts of a search that must be equal for all trials of a study."""
    recipe = search.recipe.with_values({"recipe.eval_split": search.eval_split})
    text = {"space": search.space, "variant": search.case_overrides, "points": search.points}
    digests = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in text.items()}
    return {
        "version": __version__,
        "recipe": Job("", recipe, search.first_seed, Path()).fingerprint,
        "objective": search.objective,
        "direction": search.direction,
        "sampler": search.sampler,
        "seeds": search.seeds,
        **digests,
    }
