"""`lightning-fcl data`: list, verify and download datasets, and show the stream of a recipe."""

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
    """List, verify, download and plot datasets.

    `clear-features` deletes the cached outputs of backbones. `show` also accepts settings of a recipe, such as
    --data.batch_size 16. Without --root, the dataset folder is $LIGHTNING_FCL_DATA, or ~/.cache/lightning-fcl/data if
    this variable is not set.
    """

    takes_settings = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=("ls", "verify", "download", "show", "clear-features"))
        parser.add_argument(
            "names", nargs="*", help="select datasets to verify or download (default: all), or recipes to show"
        )
        parser.add_argument(
            "--out", type=Path, metavar="FILE.png", help="with show: plot the samples by class, round and client"
        )
        parser.add_argument("--root", help="with verify or download: set the dataset folder")

    def run(self, options: Namespace) -> None:
        if options.action == "show":
            _show(options)
            return
        if options.layers:
            raise InvalidValueError(
                f"Expected no settings of a recipe for `data {options.action}`, but got "
                f"{shlex.join(Recipe(tuple(options.layers)).words)}.",
                hint="Remove them, or use `lightning-fcl data show`.",
            )
        from lightning_fcl.data import datasets

        if options.action == "clear-features":
            from lightning_fcl.data.feature_cache import clear_features

            files, size = clear_features()
            print(f"Deleted cached features: number of files {files}, size {size:,} bytes.")
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
            raise ValueError(f"{len(unusable_names)} of the datasets cannot be used: {', '.join(unusable_names)}.")


def _show(options: Namespace) -> None:
    from lightning_fcl.data.plan_summary import describe_plan, plot_plan
    from lightning_fcl.evaluation.charts import write_png
    from lightning_fcl.runs.loaded_recipe import load_recipe

    if options.out is not None and options.out.suffix != ".png":
        raise InvalidValueError(
            f"Expected `--out` to be a file that ends in .png, but got {options.out}.",
            hint=f"Use `--out {options.out.with_suffix('.png')}`.",
        )
    stream = load_recipe(find_recipes(options.names).with_layers(*options.layers)).datamodule
    stream.backbone = None  # The plan of a stream does not need features.
    stream.setup("fit")
    print(f"{stream}\n{describe_plan(stream.plan, stream.classes)}")
    if options.out is not None:
        print(write_png(options.out, plot_plan(stream.plan, stream.classes)))
