"""`lightning-fcl cp`: a recipe as one file, which runs as it is and is yours to change."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.evaluation.files import write_whole


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Write a recipe into one flat file, comments kept."
    parser.add_argument("recipe", metavar="RECIPE", help="a name of `lightning-fcl ls recipes`, or a YAML file")
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the file to write")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(options: Namespace) -> None:
    if options.file.exists() and not options.force:
        raise ValueError(f"Expected a new file but {options.file} is there. Name another, or say --force.")
    if not options.file.parent.is_dir():
        raise ValueError(f"Expected a file in a folder that is there but {options.file.parent} is none. Make it first.")
    from lightning_fcl.running.flat import flat
    from lightning_fcl.running.named import find_recipe

    recipe = find_recipe(options.recipe)
    write_whole(options.file, flat(recipe))
    print(f"{options.file}: train it with lightning-fcl fit {options.file}")
