"""`lightning-fcl fit` and `test`: names of recipes and runs, and what is said at the end; the rest is Lightning's."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from itertools import chain, count, takewhile
from pathlib import Path

from lightning_fcl.door import many_imports, summaries
from lightning_fcl.errors import did_you_mean
from lightning_fcl.evaluation.results import CONFIG, run_of
from lightning_fcl.hub.documents import read_yaml

WHAT = {"fit": "Train what a recipe says.", "test": "Test a run's newest checkpoint, or another."}
MORE = """Every argument of the Trainer, the model and the data can follow, as in
  lightning-fcl fit quickstart --trainer.max_epochs 3 --data.partition.clients 20
  lightning-fcl fit my.yaml more.yaml     later files go over earlier ones
  lightning-fcl fit runs/mine             goes on from that run's newest checkpoint
  lightning-fcl fit --help=FedViT         what a class does, and its arguments
  lightning-fcl fit --help.all            every argument
  lightning-fcl fit --print_config        a recipe with every default
"""
_HELPED = [
    "lightning_fcl",
    *(f"lightning_fcl.{name}" for name in ("callbacks", "models", "data.scenarios", "data.partition")),
]


def command(parser: ArgumentParser, words: Sequence[str]) -> None:
    name, *words = words
    parser.description, parser.epilog = WHAT[name], MORE
    parser.allow_abbrev = False  # `--model` is none of `--model.pretrained`
    what = "a name of `lightning-fcl ls recipes`, a YAML file, or a run's folder: its newest checkpoint counts"
    parser.add_argument("recipes", nargs="*", metavar="RECIPE" if name == "fit" else "RUN", help=what)
    parser.add_argument("--config", action="append", default=[], metavar="RECIPE", help="the same")
    parser.add_argument("--out", help="folder of the results (default: what the recipe says, or runs/fit)")
    parser.add_argument("--seed_everything", type=int, metavar="SEED", help="seed of everything (default: 0)")
    parser.add_argument("--ckpt_path", default="", metavar="FILE", help="checkpoint to continue from, or to test")
    parser.add_argument("--model.pretrained", metavar="NAME", help="network of the zoo in place of the recipe's")
    if helped := [word for word in words if word.startswith("--help=")]:
        print(_help(helped[0].partition("=")[2]))
        return
    positional = [*takewhile(lambda word: not word.startswith("-"), words)]
    options, _ = parser.parse_known_args(words[len(positional) :])
    for recipe in options.config:
        if not Path(recipe).exists():
            raise FileNotFoundError(f"Expected a recipe at {recipe} but there is no such file.")
        read_yaml(Path(recipe))  # refuses what is none, before anything heavy is imported
    words = [word.replace("--help.all", "--help") for word in words[len(positional) :]]
    from lightning_fcl.running.named import recipe_words

    is_run = len(positional) == 1 and (Path(positional[0]).is_dir() or (name == "test" and not options.config))
    words = [*(_of_run(Path(positional[0]), options.ckpt_path) if is_run else recipe_words(positional)), *words]
    with many_imports():  # after what may be refused without them
        from lightning_fcl.running.fit import run

    if is_run:
        print(f"{'goes on from' if name == 'fit' else 'tests'} {words[1]}")
        done = run([name, *words])
        if name == "fit" and done.leaves_results:
            print(_end(done.out))
        return
    if name == "test":
        if not options.ckpt_path and "--help" not in words:
            raise ValueError(
                "Expected a checkpoint to test but got none. Name a run's folder, as in lightning-fcl test runs/fit."
            )
        run([name, *words])
        return
    words = _with_published(words) if vars(options)["model.pretrained"] else words
    if "--print_config" in words or "--help" in words:
        run([name, *words])
        return
    if not options.ckpt_path:
        words = [*words, "--out", str(_free(options.out or _out([*positional, *options.config])))]
    done = run([name, *words])
    if done.leaves_results:
        print(_end(done.out))


def _of_run(folder: Path, checkpoint: str) -> list[str]:
    """The words for a run's recipe, its folder, and its newest checkpoint unless another one is told."""
    from lightning_fcl.hub.checkpoint import newest_checkpoint

    config, checkpoints = folder / CONFIG, folder / "checkpoints"
    if not config.is_file() or not any(checkpoints.glob("*.ckpt")):
        raise ValueError(f"Expected the folder of a run, with config.yaml and checkpoints, but got {folder}.")
    chosen = checkpoint or newest_checkpoint(checkpoints)
    if chosen is None:
        raise ValueError(f"Expected a whole checkpoint in {checkpoints} but all there are damaged. Repeat the run.")
    return ["--ckpt_path", str(chosen), "--config", str(config), "--out", str(folder)]


def _out(recipes: Sequence[str]) -> str:
    """The folder of the results, where the command line does not say."""
    said = [read_yaml(Path(one)) for one in recipes if Path(one).is_file()]
    outs = [str(content["out"]) for content in said if isinstance(content, dict) and content.get("out")]
    outs += [str(run) for one in recipes if (run := run_of(Path(one)))]
    names = [Path(one).stem if Path(one).is_file() else one.replace("@", "-") for one in recipes]
    return outs[-1] if outs else f"runs/{names[0]}" if names else "runs/fit"


def _free(out: str) -> Path:
    """The folder, or where it holds another run, the first that is free with a number behind."""
    folder = Path(out)
    above = next(one for one in [folder, *folder.parents] if one.exists())
    if not above.is_dir():
        raise ValueError(f"Expected a folder for results at {out} but {above} is a file. Choose another by `--out`.")
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


def _help(name: str) -> str:
    short = name.rpartition(".")[2]
    known = {one: package for package in _HELPED for one in summaries(package)}
    if short not in known:
        raise ValueError(f"Expected --help= and a class of lightning-fcl but got {name}.{did_you_mean(short, known)}")
    made = getattr(import_module(known[short]), short)
    arguments = ",\n    ".join(str(one) for one in inspect.signature(made).parameters.values())
    return f"{known[short]}.{short}(\n    {arguments},\n)\n\n{inspect.getdoc(made)}"


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
