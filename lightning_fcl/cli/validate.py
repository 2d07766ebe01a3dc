"""`lightning-fcl validate`: whether a recipe is understood, its data are there, and its parts fit, without training."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Check a recipe, its data and its shapes, without training."
    parser.epilog = "Every argument that `fit` takes can follow."
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="names of `lightning-fcl ls recipes`, or YAML files"
    )


def run(options: Namespace) -> None:
    from lightning_fcl.running.parts import describe_recipe
    from lightning_fcl.running.rows import find_recipes

    recipe = find_recipes(options.recipes)
    print(describe_recipe(recipe.configs, [*recipe.fit_words, *options.more]))
