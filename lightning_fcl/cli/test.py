"""`lightning-fcl test`: a run's model on the test samples."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.fit import words_of, words_of_run
from lightning_fcl.door import many_imports
from lightning_fcl.running.rows import find_recipes


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Test a run's newest checkpoint, or another."
    parser.allow_abbrev = False
    add = parser.add_argument
    add("run", nargs="*", metavar="RUN", help="a run's folder: its newest checkpoint counts")
    add("--config", action="append", default=[], metavar="RECIPE", help="the recipe of a checkpoint")
    add("--ckpt_path", default="", metavar="FILE", help="checkpoint to test")


def run(options: Namespace) -> None:
    runs, words = words_of(options)
    if len(runs) == 1 and not options.config:
        words = [*words_of_run(Path(runs[0]), options.ckpt_path), *words]
        print(f"tests {words[1]}")
    elif options.ckpt_path or "--help" in words:
        words = [*find_recipes(runs).command_words, *words]
    else:
        raise ValueError(
            "Expected a checkpoint to test but got none. Name a run's folder, as in lightning-fcl test runs/fit."
        )
    with many_imports():
        from lightning_fcl.running.fit import run as test
    test(["test", *words])
