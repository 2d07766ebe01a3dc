"""`lightning-fcl validate`: whether a recipe is understood, its data are there, and its parts fit, without training."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence


def command(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.description = "Check a recipe, its data and its shapes, without training."
    parser.epilog = "Every argument that `fit` takes can follow."
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="names of `lightning-fcl ls recipes`, or YAML files"
    )
    options, others = parser.parse_known_args(words[1:])
    from lightning_fcl.running.checking import check
    from lightning_fcl.running.named import together

    configs, told = together(options.recipes)
    print(check(configs, [*told, *others]))
