"""Training and testing a recipe with LightningCLI, and resolving a recipe with all defaults."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_fcl.runs.federated_cli import FederatedCLI
from lightning_fcl.runs.paper_rows import recipe_name
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.validation import one_of

CLI = TypeVar("CLI", bound=FederatedCLI)


def run_cli(command: str, recipe: Recipe, cli_class: type[CLI]) -> CLI:
    """Run ``fit`` or ``test`` with a recipe, and return the command line object, an instance of ``cli_class``.

    A recipe without a name gets the name of its first file, or of its paper and row.
    """
    content = recipe.content()
    section = content.setdefault("recipe", {})
    if isinstance(section, dict):
        section.setdefault("name", recipe_name(recipe))
    return make_cli({"subcommand": command, command: content}, cli_class)


def make_cli(arguments: dict[str, Any] | list[str], kind: type[CLI], runs: bool = True) -> CLI:
    """Create a command line from a dictionary or from words, and return it. Its command is run if ``runs`` is True."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for nothing_to_mend in (
        "LightningCLI's args parameter is intended",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "The `srun` command is available",
        "`LightningModule.configure_optimizers` returned `None`",  # Baselines that do not train have no optimizer.
        "Be aware that when using `ckpt_path`, callbacks used",  # Testing does not use the callbacks' states.
    ):
        warnings.filterwarnings("ignore", nothing_to_mend)
    return kind(program="lightning-fcl", args=arguments, run=runs, trainer_defaults=None)


class _ParsedError(Exception):
    """An exception that ends the command line after parsing, before any object is created."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        self.parser, self.config = parser, config


class _ParserOnly(FederatedCLI):
    """A command line that parses a recipe and creates no objects."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        fit = self._parser("fit")
        if isinstance(args, Mapping) and args["fit"]:
            super().parse_arguments(parser, args)
            config = self.config["fit"]
        else:  # Without values in the recipe, all values are defaults.
            config = fit.get_defaults(skip_validation=True)
        raise _ParsedError(fit, config)


def resolved_text(recipe: Recipe, flags: Sequence[str] = ()) -> str:
    """Return a recipe with all defaults as YAML, after checking its values.

    Args:
        recipe: The recipe.
        flags: Flags of ``--print_config``, such as ``"comments"``.
    """
    argument_by_flag = {"comments": "with_comments", "skip_default": "skip_default", "skip_unset": "skip_unset"}
    argument_by_flag["skip_null"] = argument_by_flag["skip_unset"]
    for flag in flags:
        one_of(tuple(argument_by_flag), print_config=flag)
    dump_arguments: dict[str, Any] = {"skip_unset": False} | {argument_by_flag[flag]: True for flag in flags}
    try:
        make_cli({"subcommand": "fit", "fit": recipe.content()}, _ParserOnly)
    except _ParsedError as parsed:
        text: str = parsed.parser.dump(parsed.config, skip_validation=True, **dump_arguments)
        return text
    raise AssertionError("the recipe was not parsed")


def resolve_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe with all defaults, after checking its values."""
    return dict(yaml.safe_load(resolved_text(recipe)))
