"""`lightning-fcl export`: the model of a run, or of the zoo, as files for devices."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Write a model as files for devices, compared with PyTorch."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, --out of `fit`; or a name of the zoo")
    parser.add_argument("--format", choices=("onnx", "executorch"), default="onnx", help="(default: onnx)")
    parser.add_argument("--int8", action="store_true", help="the classifier's convolutions of 8 bits, in ONNX")
    parser.add_argument("--out", type=Path, help="folder of the files (default: RUN/export)")


def run(options: Namespace) -> None:
    import numpy as np
    import torch
    from torch import nn

    from lightning_fcl.data.features import WithBackbone
    from lightning_fcl.data.scenarios import IntArray
    from lightning_fcl.device.export import WithoutTrainer, export_executorch, export_int8_onnx, export_onnx
    from lightning_fcl.running.parts import trained_parts
    from lightning_fcl.zoo.loading import load
    from lightning_fcl.zoo.registry import list_models
    from lightning_fcl.zoo.verifying import recipe_parts

    name = str(options.run)
    if not options.run.exists() and name.partition("@")[0] in list_models():
        published = load(name)
        parts, model = recipe_parts(published.entry.recipe, name), published.network
    else:
        parts = trained_parts(options.run)
        model = WithoutTrainer(parts.model)
    stream = parts.datamodule
    features = stream.setup_images()  # the file takes images

    def inputs(rows: IntArray) -> torch.Tensor:
        """A hundred of some samples, as the file takes them."""
        x: torch.Tensor = stream.take(rows[:: max(1, len(rows) // 100)][:100])[0]
        return x

    example = inputs(stream.plan.test)
    modules: dict[str, nn.Module] = {"classifier": model if features is None else WithBackbone(features, model)}
    backbone = getattr(getattr(parts.model, "model", None), "backbone", None)
    if isinstance(backbone, nn.Module):
        modules["backbone"] = backbone
    write, ending = (export_onnx, "onnx") if options.format == "onnx" else (export_executorch, "pte")
    for name, module in modules.items():
        file = (options.out or options.run / "export") / f"{name}.{ending}"
        difference = write(module, example[:8], file)
        print(f"{file}  {file.stat().st_size} bytes, at most {difference:.1e} from PyTorch")
    if options.int8:
        file = (options.out or options.run / "export") / "classifier-int8.onnx"
        train = np.concatenate([own for clients in stream.plan.train for own in clients.values()])
        share = export_int8_onnx(modules["classifier"], inputs(train), example, file)
        print(f"{file}  {file.stat().st_size} bytes, {share:.0%} of {len(example)} predictions as PyTorch's")
