"""`lightning-fcl data`: which data sets there are, how to get them, and who sees what when."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Look after data sets."
    parser.epilog = "With `show`, every argument that `fit` takes can follow."
    parser.add_argument("action", choices=("list", "check", "fetch", "show", "clear-features"))
    parser.add_argument("names", nargs="*", help="data sets (default: all); with show: a recipe")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="with show: a picture of who sees what when")
    parser.add_argument("--root", help="folder of the data sets (default: $LIGHTNING_FCL_DATA)")


def run(options: Namespace) -> None:
    if options.action == "show":
        _show(options)
        return
    if options.more:
        raise ValueError(f"Expected no arguments of a recipe for `data {options.action}` but got {options.more}.")
    from lightning_fcl.data import datasets

    if options.action == "clear-features":
        from lightning_fcl.data.features import clear_features

        files, size = clear_features()
        print(f"deleted the features of {files} sets of images, {size:,} bytes")
        return
    known = datasets.describe()
    if options.action == "list":
        for description in known:
            print(f"{description.name:12} {description.content} ({description.size}; {description.licence})")
        return
    failed = []
    for name in options.names or [description.name for description in known]:
        try:
            if options.action == "fetch":
                datasets.fetch(name, options.root)
            print(f"{name:12} {datasets.check(name, options.root)}")
        except (ValueError, OSError) as error:
            failed.append(name)
            print(f"{name:12} {error}", file=sys.stderr)
    if failed:
        raise ValueError(f"{len(failed)} of the data sets cannot be used: {', '.join(failed)}.")


def _show(options: Namespace) -> None:
    from lightning_fcl.data.overview import describe_plan, draw_plan
    from lightning_fcl.evaluation.charts import write_png
    from lightning_fcl.running.parts import read_parts
    from lightning_fcl.running.rows import find_recipes

    if options.out is not None and options.out.suffix != ".png":
        raise ValueError(f"Expected `--out` to be a file that ends in .png but got {options.out}.")
    recipe = find_recipes(options.names)
    stream = read_parts(recipe.configs, [*recipe.fit_words, *options.more]).datamodule
    stream.features = None  # who sees what does not ask for them
    stream.setup("fit")
    print(f"{stream}\n{describe_plan(stream.plan, stream.classes)}")
    if options.out is not None:
        print(write_png(options.out, draw_plan(stream.plan, stream.classes)))
