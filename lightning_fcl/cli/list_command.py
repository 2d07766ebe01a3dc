"""`lightning-fcl ls`: lists of recipes, methods, models, datasets, scenarios, partitions, metrics and zoo networks."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module

from lightning_fcl.cli.listings import public_summaries
from lightning_fcl.cli.main import Command
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.runs.paper_rows import list_recipes
from lightning_fcl.validation import did_you_mean, one_of

KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": lambda: {name: f"{recipe.title}: {recipe.summary}" for name, recipe in list_recipes().items()},
    "methods": lambda: public_summaries("lightning_fcl.methods", "Method"),
    "models": lambda: public_summaries("lightning_fcl.models"),
    "datasets": lambda: {
        one.name: f"{one.content} ({one.size}; {one.license})"
        for one in import_module("lightning_fcl.data.datasets").list_datasets()
    },
    "scenarios": lambda: public_summaries("lightning_fcl.data.scenarios", "Scenario"),
    "partitions": lambda: public_summaries("lightning_fcl.data.partition", "Partition"),
    "metrics": lambda: import_module("lightning_fcl.evaluation.metrics").describe(),
    "zoo": lambda: {
        name: published.entry.description
        for name, published in import_module("lightning_fcl.zoo.registry").list_published().items()
    },
}
_SAY = "In a recipe: {}: {{class_path: {}NAME, init_args: {{...}}}}. Arguments: lightning-fcl fit --help=NAME."
_HOW = {
    "recipes": "Train a recipe: lightning-fcl fit NAME. Copy it: lightning-fcl cp NAME my.yaml. Small run: NAME@smoke.",
    "methods": _SAY.format("trainer.callbacks", "lightning_fcl.callbacks."),
    "models": _SAY.format("model.init_args.model", "lightning_fcl.models."),
    "datasets": "In a recipe: data.data: NAME. Check the files: lightning-fcl data verify NAME.",
    "scenarios": _SAY.format("data.scenario", ""),
    "partitions": _SAY.format("data.partition", ""),
    "metrics": "In results.json: NAME/MODEL. MODEL is server, clients (mean of all clients), total, or a client's ID. "
    "In a search file: objective: NAME/MODEL.",
    "zoo": "Show a card: lightning-fcl zoo info NAME. Fine-tune: lightning-fcl fit RECIPE --model.pretrained NAME.",
}


class Ls(Command):
    """List recipes, methods, models, datasets and other items, one per line.

    KIND is recipes, methods, models, datasets, scenarios, partitions, metrics or zoo.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "kind", nargs="?", metavar="KIND", help="list items of this kind (default: count the items of all kinds)"
        )
        parser.add_argument(
            "pattern", nargs="?", default="", help='select by part of a name, or a pattern ("flwf/*-ex")'
        )
        parser.add_argument("--json", action="store_true", help="print the output as JSON")

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
                f"Expected `lightning-fcl ls {options.kind}` to list a name with {options.pattern!r}, "
                "but no name matches.",
                hint=hint,
            )
        if options.json:
            print(json.dumps(matching_descriptions, indent=1, ensure_ascii=False))
            return
        width = max(map(len, matching_descriptions))
        print("\n".join(f"{name:{width}}  {about}".rstrip() for name, about in matching_descriptions.items()))
        print(f"\n{_HOW[options.kind]}")
