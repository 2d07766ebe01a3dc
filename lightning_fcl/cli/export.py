"""`lightning-fcl export`: a run's model as files for devices."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fcl.cli.run import Parts


def command(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Write the model of a run's newest checkpoint as a file, and its frozen backbone, if it has one, as another.

    Raises:
        ValueError: If the folder is no finished run's, or the checkpoint does not fit its recipe.
    """
    parser.description = "Write a run's model as files for devices, compared with PyTorch."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: what was --out of `fit`")
    parser.add_argument("--format", choices=("onnx", "executorch"), default="onnx", help="(default: onnx)")
    parser.add_argument("--out", type=Path, help="folder of the files (default: RUN/export)")
    options = parser.parse_args(words[1:])
    from torch import nn

    from lightning_fcl.device.export import WithoutTrainer, export_executorch, export_onnx

    parts = _trained(options.run)
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


def _trained(run: Path) -> Parts:
    """A run's recipe, with the state of its newest checkpoint in the model."""
    import torch

    from lightning_fcl.callbacks.base_session import BaseSession
    from lightning_fcl.cli.run import read_parts
    from lightning_fcl.federation.aggregation import check_state
    from lightning_fcl.hub.checkpoint import newest_checkpoint, read_checkpoint

    checkpoint = newest_checkpoint(run / "checkpoints")
    if checkpoint is None or not (run / "config.yaml").is_file():
        raise ValueError(
            f"Expected {run} to be the folder of a run, with config.yaml and checkpoints, but it is none. Give what "
            "was `--out` of `lightning-fcl fit`."
        )
    parts = read_parts([run / "config.yaml"])
    for callback in parts.callbacks:
        if isinstance(callback, BaseSession):
            callback.freeze(parts.model.model)
    read = partial(torch.load, map_location="cpu", weights_only=True)
    state = read_checkpoint(read, checkpoint)["state_dict"]
    check_state(parts.model, state)
    parts.model.load_state_dict(state)
    return parts
