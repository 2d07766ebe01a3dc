"""Commands for a recipe and its run: fit, test, validate (check without training) and cp (copy to one file)."""

from __future__ import annotations

import inspect
import io
import json
import shlex
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import SingleQuotedScalarString
from yaml import YAMLError

from lightning_fcl.cli.fast_imports import fast_imports
from lightning_fcl.cli.listings import public_summaries
from lightning_fcl.cli.main import Command
from lightning_fcl.errors import InvalidValueError, MissingValueError, UnknownNameError
from lightning_fcl.evaluation.results import CONFIG, PREDICTIONS, find_run_folder
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.checkpoint import get_run_checkpoint
from lightning_fcl.io.reading import read_text
from lightning_fcl.io.safe_yaml import load_yaml
from lightning_fcl.runs.paper_rows import Row, find_recipe, find_recipes
from lightning_fcl.runs.recipe import Recipe, Setting, read_recipe_file
from lightning_fcl.runs.secret_values import secrets_of, text_without_secrets
from lightning_fcl.validation import did_you_mean

_HELPED = [
    "lightning_fcl",
    *(f"lightning_fcl.{name}" for name in ("callbacks", "models", "data.scenarios", "data.partition")),
]


class Fit(Command):
    """Train a recipe.

    Arguments of the Trainer, the model and the data override the recipe:
      lightning-fcl fit quickstart --trainer.max_epochs 3 --data.partition.num_clients 20
      lightning-fcl fit my.yaml more.yaml     later files override earlier ones
      lightning-fcl fit runs/mine             resume from the newest checkpoint of the run
      lightning-fcl fit my.yaml --seeds 5     train with the seeds 0 to 4, in runs/my/seed-0 and so on
      lightning-fcl fit my.yaml --seeds 3 --sweep model.init_args.optimizer.lr=.1,.01
      lightning-fcl fit my.yaml --predictions write predictions.csv at the end of the fit
      lightning-fcl fit --help=FedViT         describe a class and its arguments
      lightning-fcl fit --help.all            list all arguments
      lightning-fcl fit --print_config        print the recipe with all defaults
    """

    takes_settings = True

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("-h", "--help", nargs="?", action=_Help, metavar="CLASS", help="show this help, or describe a class")
        add("--help.all", dest="help_all", action="store_true", help="list all arguments of Trainer, model and data")
        add("--print_config", nargs="?", const="", metavar="FLAGS", help="print the recipe with all defaults, and exit")
        add(
            "recipes",
            nargs="*",
            metavar="RECIPE",
            help="train a recipe by name or file, or resume a run folder",
        )
        add("--config", action="append", default=[], metavar="RECIPE", help="add a recipe")
        add("--out", help="set the output folder (default: `out` of the recipe, or runs/RECIPE)")
        add("--seed_everything", metavar="SEED", help="set the random seed (default: from the recipe, or 0)")
        add("--seeds", metavar="N|A,B", help="train with the seeds 0 to N-1, or with A and B")
        add("--sweep", action="append", default=[], metavar="OPTION=A,B", help="train with each value of an option")
        add("--workers", type=int, metavar="N", help="set the processes of --seeds and --sweep (default: cores)")
        add("--predictions", action="store_true", help="write the final predictions to predictions.csv")
        add("--ckpt_path", metavar="FILE", help="resume from this checkpoint")
        add("--model.pretrained", dest="pretrained", metavar="NAME", help="start from a network of the zoo")

    def run(self, options: Namespace) -> None:
        if options.help_all:
            print_help("fit")
        option_values = {name: getattr(options, name) for name in ("out", "seed_everything", "ckpt_path")}
        for name, value in option_values.items():
            if value == "":
                raise MissingValueError(
                    f"Expected a value after `--{name}`, but got none.",
                    hint=f"Write --{name}=VALUE, or remove the option.",
                    argument=f"--{name}",
                )
        printed = options.print_config is not None
        if options.seeds is not None or options.sweep:
            self._run_several(options)
            return
        if options.workers is not None:
            raise MissingValueError(
                "Expected `--seeds` or `--sweep` with `--workers`, but got neither.",
                hint="Add `--seeds N`, or set `--trainer.devices` to train one run with several processes.",
                argument="--workers",
            )
        if continues := len(options.recipes) == 1 and is_run(Path(options.recipes[0])):
            recipe = recipe_of_run(Path(options.recipes[0]), options)
            print(f"Resuming from {recipe.content()['ckpt_path']}", file=sys.stderr if printed else sys.stdout)
        else:
            recipe = find_recipes(options.recipes).with_layers(*options.layers)
        if options.pretrained:
            recipe = recipe.with_values(_published(options.pretrained))
        if options.predictions:
            recipe = _with_predictions(recipe)
        recipe = recipe.with_values({name: value for name, value in option_values.items() if value})
        runs = [] if continues else list(filter(None, map(find_run_folder, recipe.files)))
        if not continues and not options.ckpt_path and not printed:
            recipe = recipe.with_values({"out": str(_free_folder(options))})
        elif runs and "out" not in recipe.content():
            recipe = recipe.with_values({"out": str(runs[-1])})
        with fast_imports():  # These imports are slow, so errors in the arguments are reported before them.
            from lightning_fcl.runs.federated_cli import FitCLI
            from lightning_fcl.runs.fit import resolved_text, run_cli
        if printed:
            text = resolved_text(recipe, list(filter(None, options.print_config.split(","))))
            print(text_without_secrets(text, list(secrets_of(recipe.content()))), end="")
            return
        cli = run_cli("fit", recipe, FitCLI)
        if cli.should_write_results:
            print(_end(cli.output_folder))

    def _run_several(self, options: Namespace) -> None:
        """Train several seeds or settings of a recipe."""
        from lightning_fcl.cli.sweep import run_sweep

        several_option = "--seeds" if options.seeds is not None else "--sweep"
        for folder in filter(is_run, map(Path, options.recipes)):
            raise InvalidValueError(
                f"Expected a recipe with `{several_option}`, but got the run {folder}.",
                hint=f"Use {folder / CONFIG}. The command that started several runs also resumes these runs.",
                argument="RECIPE",
                value=folder,
            )
        unsupported = {
            "--ckpt_path": options.ckpt_path,
            "--print_config": options.print_config,
            "--seed_everything": options.seed_everything if options.seeds is not None else None,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise InvalidValueError(
                    f"Expected no `{name}` with `{several_option}`, but got {value or name}.",
                    hint=f"Remove `{name}` or `{several_option}`.",
                    argument=name,
                    value=value,
                )
        recipe = find_recipes(options.recipes).with_layers(*options.layers)
        if options.pretrained:
            recipe = recipe.with_values(_published(options.pretrained))
        if options.predictions:
            recipe = _with_predictions(recipe)
        if options.seed_everything is not None:
            recipe = recipe.with_values({"seed_everything": options.seed_everything})
        command = ["fit", *options.words]
        run_sweep(recipe, options.seeds, options.sweep, options.workers, _default_folder(options), command)


def _with_predictions(recipe: Recipe) -> Recipe:
    """Return a recipe with a `PredictionWriter` among its callbacks."""
    callbacks = (recipe.content().get("trainer") or {}).get("callbacks") or []
    entries = callbacks if isinstance(callbacks, list) else [callbacks]
    names = [entry.get("class_path") if isinstance(entry, Mapping) else entry for entry in entries]
    if any(str(name).rpartition(".")[2] == "PredictionWriter" for name in names):
        return recipe
    return recipe.with_values({"trainer.callbacks+": {"class_path": "lightning_fcl.callbacks.PredictionWriter"}})


def is_run(folder: Path) -> bool:
    """Return whether a folder contains ``config.yaml``, which a fit writes to the folder of a run."""
    return folder.is_dir() and (folder / CONFIG).is_file()


def recipe_of_run(folder: Path, options: Namespace) -> Recipe:
    """Return the recipe of a run, with the run's folder, a checkpoint and the settings of the command.

    The checkpoint is `--ckpt_path`, or the newest checkpoint of the run.
    """
    checkpoint = options.ckpt_path or str(get_run_checkpoint(folder))
    recipe = Recipe((folder / CONFIG,)).with_values({"ckpt_path": checkpoint, "out": str(folder)})
    return recipe.with_layers(*options.layers)


def print_help(command: str) -> None:
    """Print all arguments of a command, and exit."""
    with fast_imports():
        from lightning_fcl.runs.federated_cli import FederatedCLI
        from lightning_fcl.runs.fit import make_cli
    make_cli([command, "--help"], FederatedCLI)


def _default_folder(options: Namespace) -> Path:
    """Return the folder for the results: ``--out``, otherwise ``out`` of the recipe, otherwise ``runs/RECIPE``."""
    out = options.out
    if not out:
        recipe_paths = [*map(Path, options.recipes), *(layer for layer in options.layers if isinstance(layer, Path))]
        files = [file for file in recipe_paths if file.is_file()]
        outs = [str(content["out"]) for content in map(read_recipe_file, files) if content.get("out")]
        outs += [str(run) for file in recipe_paths if (run := find_run_folder(file))]
        names = [file.stem if file in files else str(file).replace("@", "-") for file in recipe_paths]
        out = outs[-1] if outs else f"runs/{[*names, 'fit'][0]}"
    folder = Path(out)
    existing_path = next(one for one in [folder, *folder.parents] if one.exists())
    if not existing_path.is_dir():
        raise InvalidValueError(
            f"Expected a folder for results at {out}, but {existing_path} is a file.",
            hint="Use another folder with `--out`.",
        )
    return folder


def _free_folder(options: Namespace) -> Path:
    """Return the folder for the results. If the folder already contains a run, append a number to the folder's name."""
    folder = _default_folder(options)
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    free = next(one for one in chain([folder], numbered) if find_run_folder(one / CONFIG) is None)
    if free != folder:
        command = shlex.join(["lightning-fcl", "fit", str(folder)])
        print(f"{folder} already contains a run, which `{command}` resumes. The new run is written to {free}.")
    return free


def _end(out: Path) -> str:
    """Return the text that is printed after a fit: metrics, path of the report, and commands for the run."""
    from lightning_fcl.evaluation.results import read_results
    from lightning_fcl.evaluation.summary import summary_metrics

    numbers = [f"{one.name + ':':18}{one.text:10}{one.note}" for one in summary_metrics(read_results(out))]
    folder = shlex.quote(str(out))
    lines = [f"report:      {out / 'report.html'}"]
    lines += [f"predictions: {out / PREDICTIONS}"] if (out / PREDICTIONS).is_file() else []
    lines += [f"test:        lightning-fcl test {folder}"]
    return "\n".join([*numbers, *lines, f"publish:     lightning-fcl zoo push {folder} --name my.network --to my-zoo"])


class _Help(Action):
    """An argparse action that prints the help of the command, or the description and arguments of a class."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        if values is None:
            parser.print_help()
            parser.exit()
        short = values.rpartition(".")[2]
        homes = {name: package for package in _HELPED for name in public_summaries(package)}
        if short not in homes:
            hint = did_you_mean(short, homes)
            raise UnknownNameError(
                f"Expected --help= with a public name of lightning-fcl, but got {values}.", hint=hint
            )
        target_object = getattr(import_module(homes[short]), short)
        lines = ",\n    ".join(map(str, inspect.signature(target_object).parameters.values()))
        print(f"{homes[short]}.{short}(\n    {lines},\n)\n\n{inspect.getdoc(target_object)}")
        parser.exit()


def _published(name: str) -> dict[str, str]:
    """Return the settings that replace the network of a recipe by a published network.

    The settings contain the full name of the network, so that ``config.yaml`` contains this name, too.
    """
    from lightning_fcl.zoo.model_entry import read_folder
    from lightning_fcl.zoo.registry import resolve_folder

    entry = read_folder(resolve_folder(name))
    full = name if "/" in name else entry.full_name
    if entry.network["class_path"] == "lightning_fcl.models.ReservoirReadout":
        return {"model.reservoir": "lightning_fcl.zoo.pretrained_reservoir", "model.reservoir.name": full}
    return {"model.model": "lightning_fcl.create_model", "model.model.name": full, "model.model.pretrained": "true"}


class Test(Command):
    """Test the newest checkpoint of a run, or another checkpoint."""

    takes_settings = True

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--help.all", dest="help_all", action="store_true", help="list all arguments of Trainer, model and data")
        add("run", nargs="*", metavar="RUN", help="test the newest checkpoint of this run folder")
        add("--config", action="append", default=[], metavar="RECIPE", help="set the recipe of the checkpoint")
        add("--ckpt_path", default="", metavar="FILE", help="test this checkpoint")
        add("--out", help="set the folder of the run")

    def run(self, options: Namespace) -> None:
        if options.help_all:
            print_help("test")
        if len(options.run) == 1 and not Recipe(tuple(options.layers)).files:
            recipe = recipe_of_run(Path(options.run[0]), options)
            print(f"Testing {recipe.content()['ckpt_path']}")
        elif options.ckpt_path:
            recipe = (
                find_recipes(options.run).with_layers(*options.layers).with_values({"ckpt_path": options.ckpt_path})
            )
        else:
            raise MissingValueError(
                "Expected a checkpoint to test, but got none.",
                hint="Pass only the folder of a run, as in `lightning-fcl test runs/fit`, or pass a recipe and "
                "`--ckpt_path`.",
            )
        if options.out:
            recipe = recipe.with_values({"out": options.out})
        with fast_imports():
            from lightning_fcl.runs.federated_cli import FederatedCLI
            from lightning_fcl.runs.fit import run_cli
        run_cli("test", recipe, FederatedCLI)


class Validate(Command):
    """Check a recipe, its data and its shapes without training.

    Settings override the recipe, as in `fit`.
    """

    takes_settings = True

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="check these recipes: names or YAML files")

    def run(self, options: Namespace) -> None:
        from lightning_fcl.runs.loaded_recipe import describe_recipe

        print(describe_recipe(find_recipes(options.recipes).with_layers(*options.layers)))


class Cp(Command):
    """Copy a recipe and the files that it uses to one YAML file, with the comments of the recipe."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("recipe", metavar="RECIPE", help="copy this recipe: a name or a YAML file")
        parser.add_argument("file", type=Path, metavar="FILE.yaml", help="write to this file")
        parser.add_argument("--force", action="store_true", help="overwrite an existing file")

    def run(self, options: Namespace) -> None:
        if options.file.exists() and not options.force:
            raise InvalidValueError(
                f"Expected a new file, but {options.file} exists.", hint="Use another file name, or pass `--force`."
            )
        write_atomic(options.file, flatten_recipe(find_recipe(options.recipe)))
        print(f"Wrote {options.file}. Train it with {shlex.join(['lightning-fcl', 'fit', str(options.file)])}")


def flatten_recipe(row: Row) -> str:
    """Return a recipe as the text of one file, without `out`.

    The text contains the comments of the recipe files, but no comments of files whose names the recipe contains.
    """
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    content = Recipe((*row.recipe.files, *map(_typed, row.recipe.settings))).content()
    content.pop("out", None)  # Without `out`, a fit of the new file writes to a folder with the name of the file.
    heads, styles = list[str](), list[Any]()
    for path in row.recipe.files:
        lines = read_text(path).split("\n")
        heads += [line for line in lines if line.startswith("#") and line not in heads]
        styles.append(yaml.load("\n".join(line for line in lines if not line.startswith("#"))))
    out = io.StringIO()
    yaml.dump(_styled(content, styles), out)
    return "\n".join([*heads, out.getvalue()])


def _typed(setting: Setting) -> Setting:
    """Return a setting with its text converted to a number, list or other value, as if a file contained the text.

    A text that is not valid JSON or YAML is not converted.
    """
    text = setting.value
    if isinstance(text, str):
        with suppress(ValueError, YAMLError):
            return Setting(setting.name, load_yaml(text) if text[:1] in ("{", "[") else json.loads(text))
    return setting


def _styled(value: Any, styles: Sequence[Any]) -> Any:
    """Return a value with the comments and the style of the recipe files.

    Args:
        value: A dictionary, a list, or a plain value.
        styles: The value at the same place in each file. Later files override earlier files.
    """
    if isinstance(value, Mapping):
        maps = [one for one in styles if isinstance(one, CommentedMap)]
        mapping = CommentedMap()
        for key, inner in value.items():
            matches = [(one, name) for one in maps for name in one if name.removesuffix("+") == key]
            written_key = next((name for _, name in reversed(matches) if name == key), _quoted(key))
            mapping[written_key] = _styled(inner, [one[name] for one, name in matches])
            for styled_map, name in matches:
                if name in styled_map.ca.items:
                    mapping.ca.items[written_key] = styled_map.ca.items[name]
        if maps and all(one.fa.flow_style() for one in maps):
            mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, list):
        lists = [one for one in styles if isinstance(one, CommentedSeq)]
        items = [same for one in lists for same in one]
        sequence = CommentedSeq(_styled(one, [same for same in items if _is_same(one, same)]) for one in value)
        if lists and all(one.fa.flow_style() for one in lists):
            sequence.fa.set_flow_style()
        return sequence
    equal_values = [one for one in styles if isinstance(one, type(value)) and one == value]
    return equal_values[-1] if equal_values else _quoted(value)


def _quoted(value: Any) -> Any:
    """Return a text such as ``on`` with quotes, because YAML would read it as another type.

    Any other value is returned unchanged.
    """
    with suppress(YAMLError):
        return SingleQuotedScalarString(value) if isinstance(value, str) and load_yaml(value) != value else value
    return value


def _is_same(value: Any, style: Any) -> bool:
    """Return whether two list entries describe the same object: they have the same class, or are equal."""
    if isinstance(value, Mapping) and isinstance(style, Mapping) and "class_path" in value:
        return bool(value["class_path"] == style.get("class_path"))
    return bool(value == style)
