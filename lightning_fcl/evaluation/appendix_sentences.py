"""Sentences of an appendix on the runs of one recipe: method, data, clients, rounds, optimizer, machine and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_fcl.evaluation.bibliography import BibEntry
from lightning_fcl.evaluation.hyperparameters import as_nodes, class_name, find_nodes, is_node, plain_arguments, to_text
from lightning_fcl.evaluation.markup import Markup
from lightning_fcl.evaluation.metrics import DOWNLOAD_BYTES, UPLOAD_BYTES
from lightning_fcl.evaluation.recorded_run import RecordedRun
from lightning_fcl.evaluation.run_sources import Sources
from lightning_fcl.evaluation.statistics import seed_statistics
from lightning_fcl.evaluation.summary import format_value

LIBRARY = "lightning_fcl"
"""Key of the BibTeX entry of this library."""

_OPTIMIZERS = {"optimizer": "optimizer", "lr_scheduler": "learning rate schedule"}
_RULES = ("swarm", "synchronization", "compression")


def describe_runs(
    runs: Sequence[RecordedRun], sources: Sources, differing: Sequence[str], markup: Markup
) -> Iterator[str]:
    """Yield sentences on the runs of one recipe with several seeds. The sentences contain only recorded facts.

    Args:
        runs: The runs, at least one.
        sources: The papers of the recipe.
        differing: Names of hyperparameters that differ between the runs.
        markup: The format of the sentences.
    """
    writer = _Writer(runs, sources, markup)
    yield from writer.state(differing)
    yield from writer.method()
    yield from writer.data()
    yield from writer.rounds()
    yield from writer.training()
    yield from writer.machine()
    yield from writer.costs()
    yield from writer.others()


class _Writer:
    """The sentences on some runs, by topic.

    Args:
        runs: The runs, at least one.
        sources: The papers of the recipe.
        markup: The format of the sentences.
    """

    def __init__(self, runs: Sequence[RecordedRun], sources: Sources, markup: Markup) -> None:
        self.runs, self.sources, self.markup = runs, sources, markup
        self.first, self.config = runs[0], runs[0].config
        trainer = self.config.get("trainer") or {}
        self.strategy: Mapping[str, Any] = (trainer.get("strategy") or {}) if is_node(trainer.get("strategy")) else {}
        self.federation: Mapping[str, Any] = self.strategy.get("init_args") or {}
        self.callbacks = as_nodes(trainer.get("callbacks"))
        data = self.config.get("data") or {}
        self.stream: Mapping[str, Any] = data.get("init_args") or {} if is_node(data) else data
        self.cited: set[str] = set()  # keys of the entries that the sentences cite

    def state(self, differing: Sequence[str]) -> Iterator[str]:
        """Yield statements on unfinished runs, on a missing recipe, and on runs with different settings."""
        text = self.markup.text
        if unfinished := [run for run in self.runs if not run.run.finished]:
            seeds = _join(str(run.run.seed) for run in unfinished)
            rounds = _count((len(run.record["rounds"]) for run in unfinished), "round")
            runs = f"run with seed {seeds} has" if len(unfinished) == 1 else f"runs with the seeds {seeds} have"
            yield text(f"UNFINISHED: The {runs} not finished. The results are those after {rounds}.")
        if not all(run.config for run in self.runs):
            yield text("The recipe of the run is missing, so that most settings are unknown.")
        if differing:
            yield f"These settings differ between the runs: {_join(map(self.markup.code, differing))}."

    def method(self) -> Iterator[str]:
        """Yield sentences on the model, the methods and the paper of the recipe."""
        text, code = self.markup.text, self.markup.code
        model = self.config.get("model")
        parts = self.first.results.get("parts", {})
        if is_node(model) or parts.get("model"):
            module, *networks = [
                *(self._named(node) for node in find_nodes(model) if not self._is_optimizer(node, model))
            ] or [code(parts["model"])]
            yield f"The module is {module}{' with ' + _join(networks) if networks else ''}."
        names = [node for node in self.callbacks if self._is_method(node)]
        if names:
            yield f"The model was trained with {_join(self._named(node) for node in names)}."
        elif self.first.method_names:
            yield f"The model was trained with {_join(map(code, self.first.method_names))}."
        elif self.config:
            yield text("The model was trained without a further method.")
        recipe = self.first.results.get("recipe") or self.config.get("recipe") or {}
        if recipe.get("paper"):
            row = f", row {text(recipe['row'])}" if recipe.get("row") else ""
            yield f"The recipe is {code(recipe['paper'])}{self._cite(self.sources.recipe)}{row}."

    def data(self) -> Iterator[str]:
        """Yield sentences on the data, the partition and the scenario."""
        text, code = self.markup.text, self.markup.code
        content = self.stream.get("data")
        recorded = self.first.environment.get("data") or {}
        name = recorded.get("name") or (content if isinstance(content, str) else None)
        if isinstance(content, Mapping):
            name = class_name(content) if is_node(content) else content.get("name", name)
        details = [f"{recorded['samples']:,} samples"] if isinstance(recorded.get("samples"), int) else []
        details += [f"SHA-256 {recorded['sha256'][:16]}..."] if isinstance(recorded.get("sha256"), str) else []
        options = content.get("options") if isinstance(content, Mapping) else None
        details += [f"{option} = {to_text(value)}" for option, value in (options or {}).items()]
        if name:
            class_entries = self.sources.classes.get(content["class_path"], ()) if is_node(content) else ()
            cited = self._cite([*self.sources.data, *class_entries])
            yield f"The data are {code(str(name))}{cited}{_parenthesis(map(text, details))}."
        yield text(f"The number of clients is {_span(len(run.clients) for run in self.runs)}.")
        partition = self.stream.get("partition")
        if is_node(partition):
            yield f"The partition is {self._described(partition)}."

    def rounds(self) -> Iterator[str]:
        """Yield sentences on the scenario, the rounds and the participation."""
        text = self.markup.text
        scenario = self.stream.get("scenario")
        if is_node(scenario):
            yield f"The scenario is {self._described(scenario)}."
        experiences = _span(len(run.record["tasks"].get("server", [])) for run in self.runs)
        rounds = _count((len(run.record["rounds"]) for run in self.runs), "round")
        num_reached = _span(len({entry["experience"]["server"] for entry in run.record["rounds"]}) for run in self.runs)
        yield text(f"Training took {rounds}, in {num_reached} of {experiences} experiences.")
        sampled = _count(
            (len(entry["download_bytes"]) for run in self.runs for entry in run.record["rounds"]), "client"
        )
        participation = self.federation.get("participation")
        setting = f" (participation = {participation})" if participation is not None else ""
        yield text(f"In each round, {sampled} downloaded the state of the server{setting}.")

    def training(self) -> Iterator[str]:
        """Yield sentences on local training, optimizers and aggregation."""
        text, code = self.markup.text, self.markup.code
        local = {"local_epochs": self.federation.get("local_epochs"), "batch_size": self.stream.get("batch_size")}
        if local["local_epochs"] is not None:
            batches = f" with batches of {local['batch_size']} samples" if local["batch_size"] is not None else ""
            epochs = _count([local["local_epochs"]], "local epoch")
            yield text(f"The clients trained for {epochs} per round{batches}.")
        model = self.config.get("model") or {}
        has_optimizer = False
        for name, title in _OPTIMIZERS.items():
            for node in _named_nodes(model, name):
                has_optimizer = has_optimizer or name == "optimizer"
                yield f"The {title} is {self._described(node)}."
        if self.config and not has_optimizer:
            yield text("The recipe names no optimizer, so that the module defines its own optimizer or needs none.")
        if self.sources.averaging:
            weights = self.federation.get("client_weights")
            weighted = f" with the weights {code(str(weights))}" if weights else ""
            cited = self._cite(self.sources.averaging)
            yield f"The server averaged the uploads of the clients{weighted} (FedAvg{cited})."
        if self.federation.get("reductions"):
            yield f"Uploads were combined by the reductions {code(to_text(self.federation['reductions']))}."
        for node in _named_nodes({"server_optimizer": self.federation.get("server_optimizer")}, "server_optimizer"):
            yield f"The optimizer of the server is {self._described(node)}{self._cite(self.sources.server_optimizer)}."
        for name in _RULES:
            if is_node(self.federation.get(name)):
                yield f"The {name} is {self._described(self.federation[name])}."
        if transforms := as_nodes(self.federation.get("upload_transforms")):
            yield f"Uploads were transformed by {_join(map(self._described, transforms))}."

    def machine(self) -> Iterator[str]:
        """Yield sentences on seeds, test samples, machine and versions."""
        text = self.markup.text
        seeds = sorted(run.run.seed for run in self.runs)
        noun = "seed is" if len(seeds) == 1 else "seeds are"
        yield text(f"The random {noun} {_join(map(str, seeds))}.")
        if splits := _distinct(run.results.get("measured_on") for run in self.runs):
            yield text(f"Metrics were measured on the {_join(splits)} samples.")
        if machines := _distinct(run.results.get("machine") for run in self.runs):
            yield text(f"Hardware: {'; '.join(machines)}.")
        versions: dict[str, list[str]] = {}
        for run in self.runs:
            python = {"Python": run.environment["python"]} if run.environment.get("python") else {}
            for name, version in {**run.versions, **python}.items():
                if str(version) not in versions.setdefault(name, []):
                    versions[name].append(str(version))
        if versions:
            listed = [
                text(f"{name} {' and '.join(values)}")
                + (self.markup.cite([LIBRARY]) if name == "lightning-fcl" else "")
                for name, values in versions.items()
            ]
            yield f"Software: {', '.join(listed)}."
        else:
            yield f"Software: {text('lightning-fcl')}{self.markup.cite([LIBRARY])}."
        commits = (run.environment.get("git") or {} for run in self.runs)
        commit_texts = (
            f"{git['commit'][:12]}{' with uncommitted changes' if git.get('dirty') else ''}"
            for git in commits
            if isinstance(git.get("commit"), str)
        )
        if distinct := _distinct(commit_texts):
            yield text(f"Git commit of the working directory: {_join(distinct)}.")

    def costs(self) -> Iterator[str]:
        """Yield sentences on the duration and the communication of a run."""
        text = self.markup.text
        average_note = " on average over the seeds" if len(self.runs) > 1 else ""
        seconds = [sum(entry["seconds"] for entry in run.record["rounds"]) for run in self.runs]
        yield text(f"A run took {format_value(seed_statistics(seconds).mean, 's')}{average_note}, including tests.")
        simulated = [
            sum(entry["simulated_seconds"] for entry in run.record["rounds"])
            for run in self.runs
            if all("simulated_seconds" in entry for entry in run.record["rounds"])
        ]
        if simulated:
            yield text(
                f"The simulated clock measured {format_value(seed_statistics(simulated).mean, 's')}{average_note}."
            )
        sizes = []
        for metric, verb in ((UPLOAD_BYTES, "uploaded"), (DOWNLOAD_BYTES, "downloaded")):
            name = f"{metric.name}/total"
            values = [run.run.metrics[name] for run in self.runs if name in run.run.metrics]
            sizes += [f"{verb} {format_value(seed_statistics(values).mean, 'B')}"] if values else []
        if sizes:
            yield text(f"In a run, all clients together {' and '.join(sizes)}{average_note}.")

    def others(self) -> Iterator[str]:
        """Yield a sentence on the components with a citation that no other sentence cites."""
        parts = [
            self.markup.code(path.rpartition(".")[2]) + self._cite(entries)
            for path, entries in self.sources.classes.items()
            if not {entry.key for entry in entries} <= self.cited
        ]
        if parts:
            yield f"Further components: {_join(parts)}."

    def _is_method(self, node: Mapping[str, Any]) -> bool:
        return node["class_path"] in self.sources.methods or class_name(node) in self.first.method_names

    @staticmethod
    def _is_optimizer(node: Mapping[str, Any], model: object) -> bool:
        return any(node is other for name in _OPTIMIZERS for other in _named_nodes(model, name))

    def _cite(self, entries: Iterable[BibEntry]) -> str:
        keys = [*dict.fromkeys(entry.key for entry in entries)]
        self.cited |= {*keys}
        return self.markup.cite(keys)

    def _named(self, node: Mapping[str, Any]) -> str:
        """Return the class name of an object with its citations."""
        return self.markup.code(class_name(node)) + self._cite(self.sources.classes.get(node["class_path"], ()))

    def _described(self, node: Mapping[str, Any]) -> str:
        """Return the class name of an object with its citations and plain arguments."""
        arguments = (f"{name} = {value}" for name, value in plain_arguments(node).items() if value not in ("0", "0.0"))
        return self._named(node) + _parenthesis(map(self.markup.text, arguments))


def _named_nodes(value: object, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield each object in a value of a recipe that is the argument ``name`` of another object, at any depth."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key == name:
                yield from as_nodes(entry)
            else:
                yield from _named_nodes(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from _named_nodes(entry, name)


def _parenthesis(details: Iterable[str]) -> str:
    text = ", ".join(details)
    return f" ({text})" if text else ""


def _join(parts: Iterable[str]) -> str:
    """Return the parts with commas and "and" between them."""
    *head, last = parts
    return f"{', '.join(head)} and {last}" if head else last


def _span(numbers: Iterable[int]) -> str:
    """Return the number if all numbers are equal, otherwise the lowest and the highest number."""
    distinct = sorted(set(numbers))
    return f"{distinct[0]:,}" if len(distinct) == 1 else f"{distinct[0]:,} to {distinct[-1]:,}"


def _count(numbers: Iterable[int], noun: str) -> str:
    """Return the number or the range of numbers, with a noun in the singular or plural."""
    span = _span(numbers)
    return f"{span} {noun}{'s' * (span != '1')}"


def _distinct(values: Iterable[object]) -> list[str]:
    return [*dict.fromkeys(str(value) for value in values if value)]
