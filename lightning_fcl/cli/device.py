"""`lightning-fcl device-report`: what a microcontroller would need to run a recipe, estimated without training."""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fcl.running.fit import Parts

MORE = """M_F is what is frozen (int8), M_T what is trained (fp32). A recipe freezes a part by declaring it:
  trainer.strategy.init_args.reductions: {"model.backbone.*": fixed}
Devices and links are in lightning_fcl/device/profiles.yaml, which also says how times are estimated. A YAML file of
your own has the entries of one of them.
"""


def arguments(parser: ArgumentParser) -> None:
    parser.description = "What a microcontroller would need to run a recipe: nothing is trained."
    parser.epilog = MORE
    add = parser.add_argument
    add("recipes", nargs="*", metavar="RECIPE.yaml", help="recipes; later ones go over earlier ones")
    add("--config", action="append", default=[], help="a recipe, as `fit` takes it; behind the others")
    add("--profile", default="gap9-lpm", help="device, or a YAML file of yours (default: gap9-lpm)")
    add("--link", default="uwb-loco", help="link, or a YAML file of yours (default: uwb-loco)")
    add("--nodes", type=int, metavar="N", help="nodes of a round (default: the recipe's, or 3)")
    add("--samples", type=int, metavar="N", help="samples of an epoch (default: the recipe's, or 28)")
    add("--input", metavar="1,64,48", help="shape of a sample (default: that of the recipe's data)")
    add("--out", type=Path, help="folder for device.json and device.md (default: none)")


def run(options: Namespace) -> None:
    recipes, shape = [*options.recipes, *options.config], None
    if options.input is not None:
        shape = [int(size) if size.isdecimal() else 0 for size in options.input.split(",")]
        if min(shape) < 1:
            raise ValueError(
                f"Expected `--input` to be sizes with commas between them, as in 1,64,48, but got {options.input}."
            )
    report_recipe(recipes, options.profile, options.link, options.nodes, options.samples, shape, options.out)


def report_recipe(
    recipes: Sequence[str | Path],
    profile: str = "gap9-lpm",
    link: str = "uwb-loco",
    nodes: int | None = None,
    samples: int | None = None,
    input_shape: Sequence[int] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Print what a recipe needs, by its data where nothing else is said; write it into a folder, too."""
    from lightning_fcl.callbacks.base_session import BaseSession
    from lightning_fcl.device.report import device_report, report_text
    from lightning_fcl.evaluation.files import write_whole
    from lightning_fcl.models.quantization import fold_batchnorm
    from lightning_fcl.running.fit import read_parts
    from lightning_fcl.running.named import find_recipes

    recipe = find_recipes([str(recipe) for recipe in recipes])
    parts = read_parts(recipe.configs, recipe.words)
    if any(isinstance(callback, BaseSession) for callback in parts.callbacks):
        fold_batchnorm(parts.model)  # as the callback does before the first round
    if input_shape is None or samples is None or nodes is None:
        shape, mean, clients = _of_data(parts, required=input_shape is None)
        input_shape = shape if input_shape is None else input_shape
        samples = mean if samples is None else samples
        nodes = clients if nodes is None else nodes
    report = device_report(
        parts.model,
        input_shape,
        reductions=parts.strategy.rules,
        samples=samples,
        nodes=nodes,
        local_epochs=parts.strategy.local_epochs,
        profile=profile,
        link=link,
    )
    report = {"recipes": [str(path) for path in recipes], **report}
    text = report_text(report)
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        print(write_whole(out / "device.json", json.dumps(report, indent=1) + "\n"))
        print(write_whole(out / "device.md", text))
    return report


def _of_data(parts: Parts, required: bool) -> tuple[tuple[int, ...], int, int]:
    """Shape of a sample, mean samples of a client in a round, and clients of the fullest round."""
    from lightning_fcl.data.batches import round_half_up
    from lightning_fcl.device.report import NODES, SAMPLES

    stream = parts.datamodule
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream.setup("fit")
    except FileNotFoundError as error:
        if required:
            raise FileNotFoundError(
                "Expected the recipe's data, for the shape of a sample, but they are not there. Give the shape with "
                f"--input, as in --input 1,64,48. ({error})"
            ) from error
        return (), SAMPLES, NODES
    rounds = stream.plan.train
    sizes = [len(indices) for current in rounds for indices in current.values() if len(indices)]
    most, clients = parts.strategy.participation, max(len(current) for current in rounds)
    most = round_half_up(most * len(stream.plan.clients)) if isinstance(most, float) else most
    sample = stream.take(rounds[0][next(iter(rounds[0]))][:1])[0]
    return tuple(sample.shape[1:]), round_half_up(sum(sizes) / len(sizes)), max(1, min(most, clients))
