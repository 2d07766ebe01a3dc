"""`lightning-fcl completion`: shell completion for bash and zsh."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from lightning_fcl.cli.list_command import KINDS
from lightning_fcl.cli.main import COMMANDS, Command, load_command
from lightning_fcl.runs.paper_rows import list_recipes
from lightning_fcl.validation import require_package

_FOR_WHAT = "writes completion scripts"


_RECIPES = "_lightning_fcl_recipes"


_PREAMBLE = {
    "bash": '%s() { compgen -W "%s" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "%s() { _alternative 'recipes:recipe:(%s)' 'files:file:_files' }",
}


class Completion(Command):
    """Print a script that completes commands, recipes and options.

    In ~/.bashrc: eval "$(lightning-fcl completion bash)"
    In ~/.zshrc, below compinit: eval "$(lightning-fcl completion zsh)"
    """

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("shell", choices=tuple(_PREAMBLE))

    def run(self, options: Namespace) -> None:
        shtab = require_package("shtab", _FOR_WHAT)
        whole = _Completed("lightning-fcl", conflict_handler="resolve")
        whole.add_argument("--version", action="store_true")
        commands = whole.add_subparsers()
        for name, (class_path, description) in COMMANDS.items():
            summary = " ".join(description.partition("lightning-fcl")[0].split()).rstrip(":")
            load_command(class_path).arguments(commands.add_parser(name, help=summary, conflict_handler="resolve"))
        preamble = _PREAMBLE[options.shell] % (_RECIPES, " ".join(list_recipes()))
        script = shtab.complete(whole, options.shell, preamble={options.shell: preamble})
        # zsh reads the line `#compdef` only in files on its search path. A script for `eval` must call `compdef`.
        print(f"{script}\ncompdef _shtab_lightning_fcl lightning-fcl" if options.shell == "zsh" else script)


class _Completed(ArgumentParser):
    """An ArgumentParser that also defines the shell completion of its arguments. Subcommands use the same class."""

    def add_argument(self, *names: Any, **settings: Any) -> Action:
        action, shtab = super().add_argument(*names, **settings), require_package("shtab", _FOR_WHAT)
        if action.dest in ("recipes", "recipe", "config"):
            action.complete = {"bash": _RECIPES, "zsh": _RECIPES}  # type: ignore[attr-defined]
        elif action.dest == "kind" and not action.choices:
            action.choices = tuple(KINDS)
        elif action.dest == "out" or action.metavar == "RUN":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        return action
