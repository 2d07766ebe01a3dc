"""`lightning-fcl edge-report` and `export`: memory and time on a microcontroller, and export of a model to files."""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.library_errors import first_line
from lightning_fcl.runs.paper_rows import find_recipes

if TYPE_CHECKING:
    from lightning_fcl.runs.loaded_recipe import LoadedRecipe


class DeviceReport(Command):
    """Estimate the memory, time and energy that a recipe needs on a microcontroller, without training.

    M_F is the frozen part of the model (int8). M_T is the trained part (fp32). A recipe freezes parameters
    with the reduction `constant`:
      trainer.strategy.init_args.reductions: {"model.backbone.*": constant}
    Devices and links are in lightning_fcl/edge/profiles.yaml, which also describes how times are estimated. For
    another device or link, pass a YAML file with the same entries.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("recipes", nargs="*", metavar="RECIPE.yaml", help="read recipes; later recipes override earlier ones")
        add("--config", action="append", default=[], help="add a recipe that overrides the recipes before it")
        add("--profile", default="gap9-lpm", help="set the device, by name or YAML file (default: gap9-lpm)")
        add("--link", default="uwb-loco", help="set the link, by name or YAML file (default: uwb-loco)")
        add("--nodes", type=int, metavar="N", help="set the number of nodes per round (default: from the recipe, or 3)")
        add(
            "--samples",
            type=int,
            metavar="N",
            help="set the samples per node and epoch (default: from the recipe, or 28)",
        )
        add("--input", metavar="1,64,48", help="set the shape of a sample (default: from the data)")
        add("--out", type=Path, help="write device.json and device.md to this folder")

    def run(self, options: Namespace) -> None:
        """Print the report. With `--out`, also write the report to files.

        If `--input`, `--samples` or `--nodes` is missing, its value comes from the recipe and its data. If the data are
        not available, `--input` is required, and the other options have default values.
        """
        from lightning_fcl.callbacks.pretrain import BaseSession
        from lightning_fcl.edge.report import device_report, report_text
        from lightning_fcl.models.quantization import fold_batchnorm
        from lightning_fcl.runs.loaded_recipe import load_recipe

        shape = tuple[int, ...]()
        if options.input is not None:
            shape = tuple(int(size) if size.isdecimal() else 0 for size in options.input.split(","))
            if min(shape) < 1:
                raise InvalidValueError(
                    f"Expected `--input` to be positive sizes separated by commas, but got {options.input!r}.",
                    hint="Write the sizes as in `--input 1,64,48`.",
                )
        parts = load_recipe(find_recipes([*options.recipes, *options.config]))
        if any(isinstance(callback, BaseSession) for callback in parts.callbacks):
            fold_batchnorm(parts.model)  # In a fit, the callback does this before the first round.
        samples, nodes = options.samples, options.nodes
        if not shape or samples is None or nodes is None:
            own_shape, mean, clients = _get_data_sizes(parts, required=not shape)
            shape = shape or own_shape
            samples = mean if samples is None else samples
            nodes = clients if nodes is None else nodes
        report = device_report(
            parts.model,
            shape,
            reductions=parts.strategy.settings.rules,
            samples=samples,
            nodes=nodes,
            local_epochs=parts.strategy.settings.local_epochs,
            profile=options.profile,
            link=options.link,
        )
        report = {"recipes": [*options.recipes, *options.config], **report}
        text = report_text(report)
        print(text)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            print(write_atomic(options.out / "device.json", json.dumps(report, indent=1) + "\n"))
            print(write_atomic(options.out / "device.md", text))


def _get_data_sizes(parts: LoadedRecipe, required: bool) -> tuple[tuple[int, ...], int, int]:
    """Return the sample shape, the mean number of samples per client and round, and the number of clients per round.

    The number of clients per round is the strategy's ``participation``, converted to a number of clients. It is at most
    the largest number of clients with data in a round. If the dataset is missing and not required, return an empty
    shape and the default numbers.

    Raises:
        MissingFileError: If the dataset is missing, and ``required`` is True.
    """
    from lightning_fcl.data.batching import round_half_up
    from lightning_fcl.edge.report import NUM_NODES, SAMPLES
    from lightning_fcl.federation.synchronization import count_sampled_clients

    stream = parts.datamodule
    stream.backbone = None  # A device takes images, not features.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream.setup("fit")
    except FileNotFoundError as error:
        if required:
            raise MissingFileError(
                f"Expected the data of the recipe, to read the shape of a sample, but got: {first_line(error, 500)}",
                hint="Pass the shape with `--input`, as in `--input 1,64,48`.",
            ) from error
        return (), SAMPLES, NUM_NODES
    rounds = stream.plan.train
    sizes = [len(indices) for current in rounds for indices in current.values() if len(indices)]
    participation = count_sampled_clients(parts.strategy.participation, len(stream.plan.clients))
    clients = max(len(current) for current in rounds)
    sample = stream.get_samples(rounds[0][next(iter(rounds[0]))][:1])[0]
    return tuple(sample.shape[1:]), round_half_up(sum(sizes) / len(sizes)), max(1, min(participation, clients))


class Export(Command):
    """Export a model to files for devices, and compare the outputs of the files with the model's outputs in PyTorch."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", type=Path, metavar="RUN", help="export this run folder, or this network of the zoo")
        parser.add_argument(
            "--format", choices=("onnx", "executorch"), default="onnx", help="set the format (default: onnx)"
        )
        parser.add_argument("--int8", action="store_true", help="also write ONNX with 8-bit convolutions")
        parser.add_argument("--out", type=Path, help="set the output folder (default: RUN/export)")
        parser.add_argument(
            "--output-names", metavar="A,B", help="set the names of the outputs in ONNX files (default: from the model)"
        )
        parser.add_argument(
            "--scores", metavar="NAME", help="set the output with the class scores, for --int8 and several outputs"
        )

    def run(self, options: Namespace) -> None:
        import numpy as np
        import torch
        from torch import nn

        from lightning_fcl.data.feature_cache import BackboneAndModule
        from lightning_fcl.data.scenarios import IntArray
        from lightning_fcl.edge.export import WithoutTrainer, export_executorch, export_int8_onnx, export_onnx
        from lightning_fcl.runs.loaded_recipe import load_trained_recipe
        from lightning_fcl.zoo.loading import load
        from lightning_fcl.zoo.registry import list_models
        from lightning_fcl.zoo.verifying import recipe_parts

        if options.output_names is not None and options.format != "onnx":
            raise InvalidValueError(
                "Expected no `--output-names` with `--format executorch`, because ExecuTorch programs have no names of "
                f"outputs, but got {options.output_names}.",
                hint="Remove `--output-names`, or use `--format onnx`.",
                argument="--output-names",
                value=options.output_names,
            )
        if options.scores is not None and not options.int8:
            raise InvalidValueError(
                f"Expected `--int8` together with `--scores`, but got only `--scores {options.scores}`.",
                hint="Add `--int8`, or remove `--scores`.",
                argument="--scores",
                value=options.scores,
            )
        output_names = None if options.output_names is None else options.output_names.split(",")
        name = str(options.run)
        if not options.run.exists() and name.partition("@")[0] in list_models():
            published = load(name)
            parts, model = recipe_parts(published.entry.recipe, name), published.network
        else:
            parts = load_trained_recipe(options.run)
            model = WithoutTrainer(parts.model)
        stream = parts.datamodule
        features = stream.setup_with_images()  # The exported file takes images.

        def inputs(rows: IntArray) -> torch.Tensor:
            """Return at most 100 of the samples at ``rows``, in the format that the exported model accepts."""
            x: torch.Tensor = stream.get_samples(rows[:: max(1, len(rows) // 100)][:100])[0]
            return x

        example = inputs(stream.plan.test)
        modules: dict[str, nn.Module] = {
            "classifier": model if features is None else BackboneAndModule(features, model)
        }
        backbone = getattr(getattr(parts.model, "model", None), "backbone", None)
        if isinstance(backbone, nn.Module):
            modules["backbone"] = backbone
        folder = options.out or options.run / "export"
        for name, module in modules.items():
            if options.format == "onnx":
                file = folder / f"{name}.onnx"
                names = output_names if name == "classifier" else None
                difference = export_onnx(module, example[:8], file, output_names=names)
            else:
                file = folder / f"{name}.pte"
                difference = export_executorch(module, example[:8], file)
            print(f"{file}  {file.stat().st_size} bytes, outputs within {difference:.1e} of PyTorch")
        if options.int8:
            file = folder / "classifier-int8.onnx"
            train = np.concatenate([own for clients in stream.plan.train for own in clients.values()])
            share = export_int8_onnx(
                modules["classifier"],
                inputs(train),
                example,
                file,
                output_names=output_names,
                scores=options.scores,
            )
            print(f"{file}  {file.stat().st_size} bytes, {share:.0%} of {len(example)} predictions equal to PyTorch")
