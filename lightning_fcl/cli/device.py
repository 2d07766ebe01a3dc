"""`lightning-fcl device-report`: what a microcontroller would need to run a recipe, estimated without training."""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fcl.running.parts import RecipeParts

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
    """Print what a recipe needs, by its data where nothing else is said."""
    from lightning_fcl.callbacks.pretrain import BaseSession
    from lightning_fcl.device.report import device_report, report_text
    from lightning_fcl.evaluation.files import write_whole
    from lightning_fcl.models.quantization import fold_batchnorm
    from lightning_fcl.running.parts import read_parts
    from lightning_fcl.running.rows import find_recipes

    names, shape = [*options.recipes, *options.config], tuple[int, ...]()
    if options.input is not None:
        shape = tuple(int(size) if size.isdecimal() else 0 for size in options.input.split(","))
        if min(shape) < 1:
            raise ValueError(
                f"Expected `--input` to be sizes with commas between them, as in 1,64,48, but got {options.input}."
            )
    recipe = find_recipes(names)
    parts = read_parts(recipe.configs, recipe.fit_words)
    if any(isinstance(callback, BaseSession) for callback in parts.callbacks):
        fold_batchnorm(parts.model)  # as the callback does before the first round
    samples, nodes = options.samples, options.nodes
    if not shape or samples is None or nodes is None:
        own_shape, mean, clients = _of_data(parts, required=not shape)
        shape = shape or own_shape
        samples = mean if samples is None else samples
        nodes = clients if nodes is None else nodes
    report = device_report(
        parts.model,
        shape,
        reductions=parts.strategy.rules,
        samples=samples,
        nodes=nodes,
        local_epochs=parts.strategy.local_epochs,
        profile=options.profile,
        link=options.link,
    )
    report = {"recipes": names, **report}
    text = report_text(report)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        print(write_whole(options.out / "device.json", json.dumps(report, indent=1) + "\n"))
        print(write_whole(options.out / "device.md", text))


def _of_data(parts: RecipeParts, required: bool) -> tuple[tuple[int, ...], int, int]:
    """Shape of a sample, mean samples of a client in a round, and clients of the fullest round."""
    from lightning_fcl.data.batches import round_half_up
    from lightning_fcl.device.report import NODES, SAMPLES

    stream = parts.datamodule
    stream.features = None  # a device takes images
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
