"""Commands for a recipe and its run: train, test, check without training, and copy as one file of yours."""

from __future__ import annotations

import inspect
import io
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from lightning_fcl.cli.main import Command
from lightning_fcl.door import many_imports, summaries
from lightning_fcl.errors import InvalidValueError, MissingValueError, UnknownNameError, did_you_mean
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.results import CONFIG, run_of
from lightning_fcl.hub.checkpoint import checkpoint_of_run
from lightning_fcl.hub.documents import read_yaml
from lightning_fcl.running.rows import Row, find_recipe, find_recipes, read_recipe_file

_HELPED = [
    "lightning_fcl",
    *(f"lightning_fcl.{name}" for name in ("callbacks", "models", "data.scenarios", "data.partition")),
]


class Fit(Command):
    """Train what a recipe says.

    Every argument of the Trainer, the model and the data can follow, as in
      lightning-fcl fit quickstart --trainer.max_epochs 3 --data.partition.clients 20
      lightning-fcl fit my.yaml more.yaml     later files go over earlier ones
      lightning-fcl fit runs/mine             goes on from that run's newest checkpoint
      lightning-fcl fit --help=FedViT         what a class does, and its arguments
      lightning-fcl fit --help.all            every argument
      lightning-fcl fit --print_config        a recipe with every default
    """

    passes_on = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.allow_abbrev = False  # `--model` is none of `--model.pretrained`
        parser.add_argument("-h", "--help", nargs="?", action=_Help, metavar="CLASS", help="this, or what a class does")
        add = parser.add_argument
        add(
            "recipes",
            nargs="*",
            metavar="RECIPE",
            help="a name of `lightning-fcl ls recipes`, a file, or a run's folder",
        )
        add("--config", action="append", default=[], metavar="RECIPE", help="the same")
        add("--out", help="folder of the results (default: what the recipe says, or runs/fit)")
        add("--seed_everything", type=int, metavar="SEED", help="seed of everything (default: 0)")
        add("--ckpt_path", default="", metavar="FILE", help="checkpoint to continue from")
        add("--model.pretrained", dest="pretrained", metavar="NAME", help="network of the zoo in place of the recipe's")

    def run(self, options: Namespace) -> None:
        recipes, words = words_of(options)
        if len(recipes) == 1 and Path(recipes[0]).is_dir():
            words = [*words_of_run(Path(recipes[0]), options.ckpt_path), *words]
            print(f"goes on from {words[1]}")
            _fit(words)
            return
        words = [*find_recipes(recipes).command_words, *words]
        if options.pretrained:
            words = _with_published(words)
        if not options.ckpt_path and not {"--print_config", "--help"} & {*words}:
            words += ["--out", str(_free_folder([*recipes, *options.config], options.out))]
        _fit(words)


def words_of(options: Namespace) -> tuple[list[str], list[str]]:
    """The recipes that a command line begins with, and its other words, once the recipes among these are looked at."""
    for recipe in options.config:
        read_recipe_file(Path(recipe))  # before anything heavy is imported
    recipes = [*takewhile(lambda word: not word.startswith("-"), options.words)]
    return recipes, [word.replace("--help.all", "--help") for word in options.words[len(recipes) :]]


def words_of_run(folder: Path, checkpoint: str) -> list[str]:
    """The words for a run's recipe, its folder, and its newest checkpoint unless another one is given."""
    place = ["--config", str(folder / CONFIG), "--out", str(folder)]
    return ["--ckpt_path", checkpoint or str(checkpoint_of_run(folder)), *place]


def _fit(words: Sequence[str]) -> None:
    with many_imports():  # after what may be refused without them
        from lightning_fcl.running.fit import FitCLI, run
    done = run(["fit", *words], FitCLI)
    if done.leaves_results:
        print(_end(done.out))


def _free_folder(recipes: Sequence[str], out: str | None) -> Path:
    """The folder of the results, or where it holds another run, the first that is free with a number behind."""
    if not out:
        said = [read_recipe_file(Path(one)) for one in recipes if Path(one).is_file()]
        outs = [str(content["out"]) for content in said if isinstance(content, dict) and content.get("out")]
        outs += [str(run) for one in recipes if (run := run_of(Path(one)))]
        names = [Path(one).stem if Path(one).is_file() else one.replace("@", "-") for one in recipes]
        out = outs[-1] if outs else f"runs/{[*names, 'fit'][0]}"
    folder = Path(out)
    above = next(one for one in [folder, *folder.parents] if one.exists())
    if not above.is_dir():
        raise InvalidValueError(
            f"Expected a folder for results at {out} but {above} is a file.", hint="Choose another by `--out`."
        )
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    free = next(one for one in chain([folder], numbered) if run_of(one / CONFIG) is None)
    if free != folder:
        print(f"{folder} holds another run, with which `lightning-fcl fit {folder}` goes on: this one goes to {free}.")
    return free


def _end(out: Path) -> str:
    """What has come out, where it is, and what can be done with it."""
    from lightning_fcl.evaluation.headline import headlines
    from lightning_fcl.evaluation.results import read_results

    numbers = [f"{one.name + ':':18}{one.text:10}{one.note}" for one in headlines(read_results(out))]
    lines = [f"report:   {out / 'report.html'}", f"test it:  lightning-fcl test {out}"]
    return "\n".join([*numbers, *lines, f"keep it:  lightning-fcl zoo push {out} --name my.network --to my-zoo"])


class _Help(Action):
    """Prints what a class does and its arguments, or what a command does and its own."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        if values is None:
            parser.print_help()
            parser.exit()
        short = values.rpartition(".")[2]
        homes = {name: package for package in _HELPED for name in summaries(package)}
        if short not in homes:
            hint = did_you_mean(short, homes)
            raise UnknownNameError(f"Expected --help= and a class of lightning-fcl but got {values}.", hint=hint)
        made = getattr(import_module(homes[short]), short)
        lines = ",\n    ".join(map(str, inspect.signature(made).parameters.values()))
        print(f"{homes[short]}.{short}(\n    {lines},\n)\n\n{inspect.getdoc(made)}")
        parser.exit()


def _with_published(words: Sequence[str]) -> list[str]:
    """The words with a published network where its name was, so that the run's ``config.yaml`` tells which."""
    from lightning_fcl.zoo.entry import read_folder
    from lightning_fcl.zoo.registry import folder_of

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model.pretrained", dest="name")
    options, others = parser.parse_known_args(words)
    entry = read_folder(folder_of(options.name))
    name = options.name if "/" in options.name else entry.full_name
    if entry.network["class_path"] == "lightning_fcl.models.ReservoirReadout":
        network = {"model.reservoir": "lightning_fcl.zoo.pretrained_reservoir", "model.reservoir.name": name}
    else:
        network = {
            "model.model": "lightning_fcl.create_model",
            "model.model.name": name,
            "model.model.pretrained": "true",
        }
    return [*others, *(word for key, value in network.items() for word in (f"--{key}", value))]


class Test(Command):
    """Test a run's newest checkpoint, or another."""

    passes_on = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.allow_abbrev = False
        add = parser.add_argument
        add("run", nargs="*", metavar="RUN", help="a run's folder: its newest checkpoint counts")
        add("--config", action="append", default=[], metavar="RECIPE", help="the recipe of a checkpoint")
        add("--ckpt_path", default="", metavar="FILE", help="checkpoint to test")

    def run(self, options: Namespace) -> None:
        runs, words = words_of(options)
        if len(runs) == 1 and not options.config:
            words = [*words_of_run(Path(runs[0]), options.ckpt_path), *words]
            print(f"tests {words[1]}")
        elif options.ckpt_path or "--help" in words:
            words = [*find_recipes(runs).command_words, *words]
        else:
            raise MissingValueError(
                "Expected a checkpoint to test but got none.",
                hint="Name a run's folder, as in lightning-fcl test runs/fit.",
            )
        with many_imports():
            from lightning_fcl.running.fit import run as test
        test(["test", *words])


class Validate(Command):
    """Check a recipe, its data and its shapes, without training.

    Every argument that `fit` takes can follow.
    """

    passes_on = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "recipes", nargs="+", metavar="RECIPE", help="names of `lightning-fcl ls recipes`, or YAML files"
        )

    def run(self, options: Namespace) -> None:
        from lightning_fcl.running.parts import describe_recipe

        recipe = find_recipes(options.recipes)
        print(describe_recipe(recipe.configs, [*recipe.fit_words, *options.more]))


class Cp(Command):
    """Write a recipe into one flat file, comments kept."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("recipe", metavar="RECIPE", help="a name of `lightning-fcl ls recipes`, or a YAML file")
        parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the file to write")
        parser.add_argument("--force", action="store_true", help="write over a file that is there")

    def run(self, options: Namespace) -> None:
        if options.file.exists() and not options.force:
            raise InvalidValueError(
                f"Expected a new file but {options.file} is there.", hint="Name another, or say --force."
            )
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
