"""`lightning-fcl cp`: a recipe as one file, which runs as it is and is yours to change."""

from __future__ import annotations

import io
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.hub.documents import read_yaml
from lightning_fcl.running.rows import Row, find_recipe


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Write a recipe into one flat file, comments kept."
    parser.add_argument("recipe", metavar="RECIPE", help="a name of `lightning-fcl ls recipes`, or a YAML file")
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the file to write")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(options: Namespace) -> None:
    if options.file.exists() and not options.force:
        raise ValueError(f"Expected a new file but {options.file} is there. Name another, or say --force.")
    write_whole(options.file, flat(find_recipe(options.recipe)))
    print(f"{options.file}: train it with lightning-fcl fit {options.file}")


def flat(recipe: Row) -> str:
    """A recipe as one file that stands for the same but for its folder, with the comments of all its files."""
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True  # a key `on` would be read as true without
    heads, whole = [], CommentedMap()
    for path in recipe.configs:
        read_yaml(path)  # bounded, and understood
        text = path.read_text(encoding="utf-8")
        head = [line for line in text.split("\n") if line.startswith("#")]
        heads += [line for line in head if line not in heads]
        body = yaml.load("\n".join(line for line in text.split("\n") if not line.startswith("#")))
        _merge(whole, body)
    for name, value in zip(recipe.fit_words[::2], recipe.fit_words[1::2], strict=True):
        parsed = YAML(typ="safe").load(value)
        plain = isinstance(parsed, dict | list) and value[0] not in "{["  # text with a colon in it
        first, *inner = name.removeprefix("--").split(".")
        more = value if plain else parsed
        for key in reversed(inner):
            more = CommentedMap({key: more})
        _merge(whole, CommentedMap({first: more}))
    whole.pop("out", None)  # a file's results go to a folder of its own name
    out = io.StringIO()
    yaml.dump(whole, out)
    return "\n".join([*heads, out.getvalue()])


def _merge(whole: CommentedMap, more: CommentedMap) -> None:
    """Put a recipe over another, as the command line does, its comments too."""
    for key, value in more.items():
        name = key.removesuffix("+")
        here = whole.get(name)
        if key != name and isinstance(here, list):
            here.extend(value if isinstance(value, list) else [value])
        elif isinstance(value, CommentedMap) and isinstance(here, list):
            _merge(here[-1], value)  # as the command line means it
        elif isinstance(value, CommentedMap) and isinstance(here, str) and "init_args" in value:
            whole[name] = CommentedMap({"class_path": here})
            _merge(whole[name], value)
        elif (
            isinstance(value, CommentedMap)
            and isinstance(here, CommentedMap)
            and not ("class_path" in value and value["class_path"] != here.get("class_path"))
        ):
            here.fa.set_block_style()  # a comment on a line of its own breaks the lines of a flow
            _merge(here, value)
        else:
            whole[name] = value
        if key in more.ca.items:
            whole.ca.items[name] = more.ca.items[key]
