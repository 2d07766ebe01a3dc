"""Text for the appendix of a paper: a paragraph for each method, tables of hyperparameters and results, and BibTeX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_fcl import __version__
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.appendix_sentences import LIBRARY, describe_runs
from lightning_fcl.evaluation.bibliography import BibEntry, packaged_entries
from lightning_fcl.evaluation.hyperparameters import Hyperparameter, list_hyperparameters
from lightning_fcl.evaluation.markup import Markup
from lightning_fcl.evaluation.recorded_run import RecordedRun
from lightning_fcl.evaluation.run_sources import Sources
from lightning_fcl.evaluation.run_table import RunTable, headline_metrics

_HEAD = ("class", "hyperparameter", "value")


@dataclass(frozen=True)
class AppendixRow:
    """The runs of one recipe with several seeds.

    Args:
        label: Name of the row.
        runs: The runs, at least one.
        sources: The papers of the recipe.
    """

    label: str
    runs: Sequence[RecordedRun]
    sources: Sources

    @cached_property
    def hyperparameters(self) -> dict[str, Hyperparameter]:
        """Hyperparameters by their path in the recipe. If the runs have different values, the text contains all."""
        by_run = self._by_run
        all_values = {path: value for values in reversed(by_run) for path, value in values.items()}
        result = {}
        for path in dict.fromkeys(path for values in by_run for path in values):
            texts = dict.fromkeys(values[path].value if path in values else "not set" for values in by_run)
            result[path] = all_values[path]._replace(value="; ".join(texts))
        return result

    @property
    def differing(self) -> list[str]:
        """Names of hyperparameters that differ between the runs."""
        by_run = self._by_run
        return [
            f"{value.owner}.{value.name}"
            for path, value in self.hyperparameters.items()
            if len({values.get(path) for values in by_run}) > 1
        ]

    @property
    def _by_run(self) -> list[dict[str, Hyperparameter]]:
        return [{one.path: one for one in list_hyperparameters(run.config)} for run in self.runs]


def make_appendix(rows: Sequence[AppendixRow], markup: Markup) -> str:
    """Return the text of an appendix without the BibTeX entries.

    Args:
        rows: The methods, at least one.
        markup: The format of the text.
    """
    parts = [markup.comment(f"Written by lightning-fcl {__version__} from the records of the runs.")]
    missing = dict.fromkeys(path for row in rows for path in row.sources.not_imported)
    parts += [
        markup.comment(
            f"The class {path} could not be imported, so that its citations are missing. To include them, run this "
            "command in the folder of your project."
        )
        for path in missing
    ]
    for row in rows:
        sentences = describe_runs(row.runs, row.sources, row.differing, markup)
        parts.append(markup.paragraph(row.label, sentences))
    parts += [*_hyperparameter_tables(rows, markup), *_results_table(rows, markup)]
    return "\n\n".join(parts) + "\n"


def make_bibliography(rows: Sequence[AppendixRow]) -> str:
    """Return the BibTeX entries that an appendix cites: methods, data, recipes and this library.

    Raises:
        InvalidValueError: If two entries have the same key and different texts.
    """
    entries: dict[str, BibEntry] = {}
    for entry in (*(entry for row in rows for entry in row.sources.entries), _library_entry(rows)):
        if entries.setdefault(entry.key, entry).text != entry.text:
            raise InvalidValueError(
                f"Expected one BibTeX entry with the key {entry.key}, but got two different entries.",
                hint="Use another key in `citations` of your class.",
                argument="citations",
                value=entry.key,
            )
    return "\n\n".join(entry.text for entry in entries.values()) + "\n"


def _library_entry(rows: Sequence[AppendixRow]) -> BibEntry:
    """Return the BibTeX entry of this library, with the versions of the runs if they are known."""
    entry = packaged_entries()[LIBRARY]
    versions = dict.fromkeys(run.versions["lightning-fcl"] for row in rows for run in row.runs if run.versions)
    note = f"{{{entry.fields['note']}, version {', '.join(versions)}}}" if versions else f"{{{entry.fields['note']}}}"
    return BibEntry(entry.key, entry.kind, entry.fields, entry.text.replace(f"{{{entry.fields['note']}}}", note))


def _hyperparameter_tables(rows: Sequence[AppendixRow], markup: Markup) -> Iterator[str]:
    """Yield a table of the hyperparameters that all rows share, and a table for each row with other hyperparameters."""
    shared = {
        path: value
        for path, value in rows[0].hyperparameters.items()
        if all(row.hyperparameters.get(path) == value for row in rows[1:])
    }
    if shared:
        yield _table("Hyperparameters" + (" of all methods." if len(rows) > 1 else "."), shared.values(), markup)
    for row in rows:
        if row_values := [value for path, value in row.hyperparameters.items() if path not in shared]:
            yield _table(f"Hyperparameters of {row.label}.", row_values, markup)


def _table(caption: str, values: Iterable[Hyperparameter], markup: Markup) -> str:
    lines = [[markup.code(text) for text in (one.owner, one.name, one.value)] for one in values]
    return markup.table(markup.text(caption), markup.grid(_HEAD, lines))


def _results_table(rows: Sequence[AppendixRow], markup: Markup) -> Iterable[str]:
    """Return the table of the main results, or nothing if no run has a metric."""
    groups = {row.label: [run.results_for_tables for run in row.runs] for row in rows}
    metrics = headline_metrics(groups)
    if not metrics:
        return []
    table = RunTable.from_runs(groups, metrics)
    caption = f"Results. {table.note}"
    return [markup.table(markup.text(caption), table.grid(markup))]
