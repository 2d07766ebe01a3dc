"""`lightning-fcl appendix`: text, tables and BibTeX for the appendix of a paper."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import FileConflictError, InvalidValueError
from lightning_fcl.evaluation.bibliography import BibEntry, find_entries
from lightning_fcl.evaluation.markup import MARKUPS, TextFormat
from lightning_fcl.evaluation.results import check_output_file
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text

_BIBTEX = ".bib"
# First line of a file of BibTeX entries that this command has written, and may overwrite.
_WRITTEN = "% Written by lightning-fcl appendix."


class Appendix(Command):
    """Print a description of runs for the appendix of a paper, with BibTeX.

    lightning-fcl appendix runs/mine                                    a run, or all seeds in a folder
    lightning-fcl appendix runs/with runs/without --format markdown     a paragraph for each method
    lightning-fcl appendix runs/mine --out appendix.tex                 also writes appendix.bib

    The text contains a paragraph for each method, a table of hyperparameters and a table of the main results. All facts
    are from the files of the runs. LaTeX needs the package booktabs. Folders seed-0, seed-1 and so on are the seeds of
    one method. The attribute `citations` of your own classes adds BibTeX entries.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("runs", nargs="+", type=Path, metavar="RUN", help="read a run folder, or a folder of runs")
        add("--format", choices=get_args(TextFormat), default="latex", help="set the format (default: latex)")
        add("--out", type=Path, metavar="FILE", help="write the text to FILE, and BibTeX to a .bib file beside it")

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.appendix import AppendixRow, make_appendix, make_bibliography
        from lightning_fcl.evaluation.recorded_run import find_recorded_runs
        from lightning_fcl.runs.run_citations import find_sources

        out: Path | None = options.out
        if out is not None:
            check_output_file(out)
        if out is not None and out.suffix == _BIBTEX:
            raise InvalidValueError(
                f"Expected `--out` to be the file of the text, but got {out}. BibTeX is written to a file beside it.",
                hint=f"Use --out {out.with_suffix('.tex')}.",
                argument="--out",
                value=out,
            )
        bibliography = None if out is None else out.with_suffix(_BIBTEX)
        if (
            bibliography is not None
            and bibliography.is_file()
            and not read_text(bibliography, errors="replace").startswith(_WRITTEN)
        ):
            raise FileConflictError(
                f"Expected {bibliography} not to exist, because the BibTeX entries are written to this file.",
                hint="Use another --out, or move this file.",
                argument="--out",
                value=bibliography,
            )
        rows = []
        for label, runs in find_recorded_runs(options.runs).items():
            sources = find_sources(runs[0])
            classes = {**sources.classes, **_zoo_entries(runs[0].config)}
            rows.append(AppendixRow(label, runs, replace(sources, classes=classes)))
        markup = MARKUPS[options.format]
        text, entries = make_appendix(rows, markup), make_bibliography(rows)
        if out is None or bibliography is None:
            print(text, markup.bibliography(entries.rstrip()), sep="\n")
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        paths = write_atomic(out, text), write_atomic(bibliography, f"{_WRITTEN}\n\n{entries}")
        print("Wrote {} and {}".format(*paths))


def _zoo_entries(config: Mapping[str, Any]) -> dict[str, tuple[BibEntry, ...]]:
    """Return the papers of the pretrained networks in a recipe, by the ``class_path`` that loads a network.

    Networks of a Hugging Face repository have no entry.
    """
    from lightning_fcl.evaluation.hyperparameters import class_name, find_nodes
    from lightning_fcl.runs.paper_rows import row_citations
    from lightning_fcl.zoo.registry import list_published

    entries: dict[str, tuple[BibEntry, ...]] = {}
    for node in find_nodes(config):
        name = (node.get("init_args") or {}).get("name")
        if class_name(node) in ("create_model", "pretrained_reservoir") and isinstance(name, str):
            published = list_published().get(name.partition("@")[0])
            recipe = published.entry.recipe if published else {}
            keys = row_citations(str(recipe.get("paper") or ""), str(recipe.get("row") or ""))
            entries[str(node["class_path"])] = find_entries(keys, f"the network {name}")
    return entries
