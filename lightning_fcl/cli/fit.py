"""`lightning-fcl fit` and `test`: their help, which does not wait for Lightning; the rest is Lightning's, in `run`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning_fcl.hub.documents import check_file

WHAT = {"fit": "Train what a recipe says.", "test": "Test a checkpoint."}
MORE = """Every argument of the Trainer, the model and the data can follow, as in
  lightning-fcl fit --config recipes/quickstart.yaml --trainer.max_epochs 3 --data.partition.clients 20
  lightning-fcl fit --print_config      prints a recipe with every default
  lightning-fcl fit --help.all          lists them all
"""


def command(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Run ``fit`` or ``test``.

    Raises:
        ValueError: If a checkpoint, a recipe or an argument is not understood.
    """
    parser.description, parser.epilog = WHAT[words[0]], MORE
    parser.add_argument("--config", action="append", help="a recipe; later ones go over earlier ones")
    parser.add_argument("--out", help="folder of the results (default: runs/fit)")
    parser.add_argument("--seed_everything", type=int, help="seed of everything (default: 0)")
    parser.add_argument("--ckpt_path", default="", help="checkpoint to continue from, or to test")
    parser.add_argument(
        "--model.pretrained", metavar="NAME", help="network of `zoo ls` to begin with, not the recipe's"
    )
    options, _ = parser.parse_known_args(words[1:])
    for recipe in options.config or []:
        if Path(recipe).exists():
            check_file(Path(recipe))
    from lightning_fcl.running.fit import run

    words = [word.replace("--help.all", "--help") for word in words]
    run(_with_published(words) if vars(options)["model.pretrained"] else words)


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
