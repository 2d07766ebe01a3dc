"""Commands that tell: what there is, data sets, what a method's implementation fulfils, and names for a shell."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_fcl.cli.listings import public_summaries
from lightning_fcl.cli.main import COMMANDS, Command, load_command
from lightning_fcl.errors import InvalidValueError, UnknownNameError, did_you_mean, one_of, require_package
from lightning_fcl.runs.paper_rows import find_recipes, list_recipes
from lightning_fcl.runs.recipe import Recipe

KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": lambda: {name: f"{recipe.title}: {recipe.summary}" for name, recipe in list_recipes().items()},
    "methods": lambda: public_summaries("lightning_fcl.methods", "Method"),
    "models": lambda: public_summaries("lightning_fcl.models"),
    "datasets": lambda: {
        one.name: f"{one.content} ({one.size}; {one.licence})"
        for one in import_module("lightning_fcl.data.datasets").list_datasets()
    },
    "scenarios": lambda: public_summaries("lightning_fcl.data.scenarios", "Scenario"),
    "partitions": lambda: public_summaries("lightning_fcl.data.partition", "Partition"),
    "metrics": lambda: import_module("lightning_fcl.evaluation.metrics").describe(),
    "zoo": lambda: {
        name: published.entry.about
        for name, published in import_module("lightning_fcl.zoo.registry").list_published().items()
    },
}
_SAY = "In a recipe: {}: {{class_path: {}NAME, init_args: {{...}}}}. Arguments: lightning-fcl fit --help=NAME."
_HOW = {
    "recipes": "Train one: lightning-fcl fit NAME. Make it yours: lightning-fcl cp NAME my.yaml. Smaller: NAME@smoke.",
    "methods": _SAY.format("trainer.callbacks", "lightning_fcl.callbacks."),
    "models": _SAY.format("model.init_args.model", "lightning_fcl.models."),
    "datasets": "In a recipe: data.data: NAME. Is it there: lightning-fcl data check NAME.",
    "scenarios": _SAY.format("data.scenario", ""),
    "partitions": _SAY.format("data.partition", ""),
    "metrics": "In results.json: NAME/MODEL, where MODEL is server, clients (their mean), total, or a client's id. "
    "In a search file: objective: NAME/MODEL.",
    "zoo": "A card: lightning-fcl zoo info NAME. To begin with: lightning-fcl fit RECIPE --model.pretrained NAME.",
}
_FOR_WHAT = "writes what shells complete by"
_RECIPES = "_lightning_fcl_recipes"
_PREAMBLE = {
    "bash": '%s() { compgen -W "%s" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "%s() { _alternative 'recipes:recipe:(%s)' 'files:file:_files' }",
}


class Ls(Command):
    """List what there is, a line each."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {', '.join(KINDS)} (default: how many)")
        parser.add_argument("pattern", nargs="?", default="", help='part of a name, or a pattern such as "flwf/*-ex"')
        parser.add_argument("--json", action="store_true", help="as JSON: what each is, by its name")

    def run(self, options: Namespace) -> None:
        if options.kind is None:
            counts = {kind: len(of()) for kind, of in KINDS.items()}
            text = "\n".join(f"{kind:12}{count:4}   lightning-fcl ls {kind}" for kind, count in counts.items())
            print(json.dumps(counts, indent=1) if options.json else text)
            return
        one_of(tuple(KINDS), kind=options.kind)
        descriptions = KINDS[options.kind]()
        pattern = options.pattern if any(sign in options.pattern for sign in "*?[") else f"*{options.pattern}*"
        matching_descriptions = {
            name: about for name, about in descriptions.items() if fnmatch(name.lower(), pattern.lower())
        }
        if not matching_descriptions:
            hint = did_you_mean(options.pattern, descriptions)
            raise UnknownNameError(
                f"Expected {options.kind} whose name has {options.pattern!r} in it but there are none.", hint=hint
            )
        if options.json:
            print(json.dumps(matching_descriptions, indent=1, ensure_ascii=False))
            return
        width = max(map(len, matching_descriptions))
        print("\n".join(f"{name:{width}}  {about}".rstrip() for name, about in matching_descriptions.items()))
        print(f"\n{_HOW[options.kind]}")


class Data(Command):
    """Look after data sets.

    With `show`, every argument that `fit` takes can follow.
    """

    takes_settings = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=("list", "check", "fetch", "show", "clear-features"))
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
        if options.action == "list":
            for description in dataset_descriptions:
                print(f"{description.name:12} {description.content} ({description.size}; {description.licence})")
            return
        unusable_names = []
        for name in options.names or [description.name for description in dataset_descriptions]:
            try:
                if options.action == "fetch":
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
    stream.features = None  # who sees what does not ask for them
    stream.setup("fit")
    print(f"{stream}\n{describe_plan(stream.plan, stream.classes)}")
    if options.out is not None:
        print(write_png(options.out, plot_plan(stream.plan, stream.classes)))


class Conformance(Command):
    """Try an implementation of a method against what its paper states, on a small federation.

    lightning-fcl conformance FedProx          the library's
    lightning-fcl conformance my_methods.py    every class of a file of yours that is a method, or has `claims`
    lightning-fcl conformance my_methods.Prox  one of them, of a module that can be imported
    """

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "target", metavar="METHOD_OR_FILE", help="a method's name, a Python file, or a class's path"
        )
        parser.add_argument(
            "--claims", metavar="NAME", help="whose statements to try (default: its `claims`, or its name)"
        )

    def run(self, options: Namespace) -> None:
        from lightning_fcl.conformance import get_classes, run_statements

        num_failed = num_tried = 0
        for kind in get_classes(options.target, options.claims):
            for statement, outcome in run_statements(kind):
                num_failed += outcome.result == "fails"
                num_tried += outcome.result != "not tried"
                print(f"{kind.__name__:16} {statement}: {outcome}", flush=True)
        print(f"{num_tried - num_failed} of {num_tried} statements hold.")
        if num_failed:
            raise InvalidValueError(f"Expected every statement to hold but {num_failed} of {num_tried} do not.")


class Completion(Command):
    """Print what a shell needs to complete commands, recipes and options.

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
        # zsh looks for scripts by their first line; one that is evaluated says itself what it completes.
        print(f"{script}\ncompdef _shtab_lightning_fcl lightning-fcl" if options.shell == "zsh" else script)


class _Completed(ArgumentParser):
    """A parser whose arguments say how they are completed, and those of its subcommands."""

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
