"""`lightning-fcl export`: a run's model as files for devices."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Write a run's model as files for devices, compared with PyTorch."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: what was --out of `fit`")
    parser.add_argument("--format", choices=("onnx", "executorch"), default="onnx", help="(default: onnx)")
    parser.add_argument("--out", type=Path, help="folder of the files (default: RUN/export)")


def run(options: Namespace) -> None:
    from torch import nn

    from lightning_fcl.device.export import WithoutTrainer, export_executorch, export_onnx
    from lightning_fcl.running.parts import trained_parts

    parts = trained_parts(options.run)
    parts.datamodule.setup("test")
    example = parts.datamodule.take(parts.datamodule.plan.test[:8])[0]
    modules: dict[str, nn.Module] = {"classifier": WithoutTrainer(parts.model)}
    backbone = getattr(getattr(parts.model, "model", None), "backbone", None)
    if isinstance(backbone, nn.Module):
        modules["backbone"] = backbone
    write, ending = (export_onnx, "onnx") if options.format == "onnx" else (export_executorch, "pte")
    for name, module in modules.items():
        file = (options.out or options.run / "export") / f"{name}.{ending}"
        difference = write(module, example, file)
        print(f"{file}  {file.stat().st_size} bytes, at most {difference:.1e} from PyTorch")
