"""`lightning-fcl data`: list, verify and download data sets, and show a recipe's stream."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.runs.paper_rows import find_recipes
from lightning_fcl.runs.recipe import Recipe


class Data(Command):
    """Look after data sets.

    With `show`, every argument that `fit` takes can follow.
    """

    takes_settings = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=("ls", "verify", "download", "show", "clear-features"))
        parser.add_argument("names", nargs="*", help="data sets (default: all); with show: a recipe")
        parser.add_argument("--out", type=Path, metavar="FILE.png", help="with show: a picture of who sees what when")
        parser.add_argument("--root", help="folder of the data sets (default: $LIGHTNING_FCL_DATA)")

    def run(self, options: Namespace) -> None:
        if options.action == "show":
            _show(options)
            return
        if options.layers:
            raise InvalidValueError(
                f"Expected no arguments of a recipe for `data {options.action}` but got "
                f"{shlex.join(Recipe(tuple(options.layers)).words)}.",
                hint="Leave them out, or use `lightning-fcl data show`.",
            )
        from lightning_fcl.data import datasets

        if options.action == "clear-features":
            from lightning_fcl.data.feature_cache import clear_features

            files, size = clear_features()
            print(f"deleted the features of {files} sets of images, {size:,} bytes")
            return
        dataset_descriptions = datasets.list_datasets()
        if options.action == "ls":
            for description in dataset_descriptions:
                print(f"{description.name:12} {description.content} ({description.size}; {description.license})")
            return
        unusable_names = []
        for name in options.names or [description.name for description in dataset_descriptions]:
            try:
                if options.action == "download":
                    datasets.download(name, options.root)
                print(f"{name:12} {datasets.verify(name, options.root)}")
            except (ValueError, OSError) as error:
                unusable_names.append(name)
                print(f"{name:12} {error}", file=sys.stderr)
        if unusable_names:
            raise ValueError(f"{len(unusable_names)} of the data sets cannot be used: {', '.join(unusable_names)}.")


def _show(options: Namespace) -> None:
    from lightning_fcl.data.plan_summary import describe_plan, plot_plan
    from lightning_fcl.evaluation.charts import write_png
    from lightning_fcl.runs.loaded_recipe import load_recipe

    if options.out is not None and options.out.suffix != ".png":
        raise InvalidValueError(
            f"Expected `--out` to be a file that ends in .png but got {options.out}.",
            hint=f"Use `--out {options.out.with_suffix('.png')}`.",
        )
    stream = load_recipe(find_recipes(options.names).with_layers(*options.layers)).datamodule
    stream.backbone = None  # who sees what does not ask for them
    stream.setup("fit")
    print(f"{stream}\n{describe_plan(stream.plan, stream.classes)}")
    if options.out is not None:
        print(write_png(options.out, plot_plan(stream.plan, stream.classes)))
