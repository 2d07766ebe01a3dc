"""`lightning-fcl ls`: what there is to use, a line each."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module

from lightning_fcl.door import summaries
from lightning_fcl.errors import did_you_mean, one_of
from lightning_fcl.running.rows import named_recipes


def arguments(parser: ArgumentParser) -> None:
    parser.description = "List what there is, a line each."
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {', '.join(KINDS)} (default: how many)")
    parser.add_argument("pattern", nargs="?", default="", help='part of a name, or a pattern such as "flwf/*-ex"')
    parser.add_argument("--json", action="store_true", help="as JSON: what each is, by its name")


def run(options: Namespace) -> None:
    if options.kind is None:
        counts = {kind: len(of()) for kind, of in KINDS.items()}
        text = "\n".join(f"{kind:12}{count:4}   lightning-fcl ls {kind}" for kind, count in counts.items())
        print(json.dumps(counts, indent=1) if options.json else text)
        return
    one_of(tuple(KINDS), kind=options.kind)
    found = KINDS[options.kind]()
    pattern = options.pattern if any(sign in options.pattern for sign in "*?[") else f"*{options.pattern}*"
    chosen = {name: about for name, about in found.items() if fnmatch(name.lower(), pattern.lower())}
    if not chosen:
        hint = did_you_mean(options.pattern, found)
        raise ValueError(f"Expected {options.kind} whose name has {options.pattern!r} in it but there are none.{hint}")
    if options.json:
        print(json.dumps(chosen, indent=1, ensure_ascii=False))
        return
    width = max(map(len, chosen))
    print("\n".join(f"{name:{width}}  {about}".rstrip() for name, about in chosen.items()))
    print(f"\n{_HOW[options.kind]}")


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": lambda: {name: f"{recipe.title}: {recipe.about}" for name, recipe in named_recipes().items()},
    "methods": lambda: summaries("lightning_fcl.methods", "Method"),
    "models": lambda: summaries("lightning_fcl.models"),
    "datasets": lambda: {
        one.name: f"{one.content} ({one.size}; {one.licence})"
        for one in import_module("lightning_fcl.data.datasets").describe()
    },
    "scenarios": lambda: summaries("lightning_fcl.data.scenarios", "Scenario"),
    "partitions": lambda: summaries("lightning_fcl.data.partition", "Partition"),
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
    "zoo": "A card: lightning-fcl zoo info NAME. To begin with: lightning-fcl fit RECIPE --model.pretrained NAME.",
}
