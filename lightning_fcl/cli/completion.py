"""`lightning-fcl completion`: what a shell needs to complete commands, names of recipes, and options."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_fcl.cli.ls import KINDS
from lightning_fcl.cli.main import COMMANDS
from lightning_fcl.errors import require
from lightning_fcl.running.rows import named_recipes

MORE = """In ~/.bashrc: eval "$(lightning-fcl completion bash)"
In ~/.zshrc, below compinit: eval "$(lightning-fcl completion zsh)"
"""
_FOR_WHAT = "writes what shells complete by"
_RECIPES = "_lightning_fcl_recipes"
_PREAMBLE = {
    "bash": '%s() { compgen -W "%s" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "%s() { _alternative 'recipes:recipe:(%s)' 'files:file:_files' }",
}


def arguments(parser: ArgumentParser) -> None:
    parser.description, parser.epilog = "Print what a shell needs to complete commands, recipes and options.", MORE
    parser.add_argument("shell", choices=tuple(_PREAMBLE))


def run(options: Namespace) -> None:
    shtab = require("shtab", _FOR_WHAT)
    whole = _Completed("lightning-fcl", conflict_handler="resolve")
    whole.add_argument("--version", action="store_true")
    commands = whole.add_subparsers()
    for name, (module, what) in COMMANDS.items():
        about = " ".join(what.partition("lightning-fcl")[0].split()).rstrip(":")
        import_module(f"lightning_fcl.cli.{module}").arguments(
            commands.add_parser(name, help=about, conflict_handler="resolve")
        )
    preamble = _PREAMBLE[options.shell] % (_RECIPES, " ".join(named_recipes()))
    script = shtab.complete(whole, options.shell, preamble={options.shell: preamble})
    # zsh looks for scripts by their first line; one that is evaluated says itself what it completes.
    print(f"{script}\ncompdef _shtab_lightning_fcl lightning-fcl" if options.shell == "zsh" else script)


class _Completed(ArgumentParser):
    """A parser whose arguments say how they are completed, and those of its subcommands."""

    def add_argument(self, *names: Any, **settings: Any) -> Action:
        action, shtab = super().add_argument(*names, **settings), require("shtab", _FOR_WHAT)
        if action.dest in ("recipes", "recipe", "config"):
            action.complete = {"bash": _RECIPES, "zsh": _RECIPES}  # type: ignore[attr-defined]
        elif action.dest == "kind" and not action.choices:
            action.choices = tuple(KINDS)
        elif action.dest == "out" or action.metavar == "RUN":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        return action
