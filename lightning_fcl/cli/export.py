"""`lightning-fcl export`: a run's model as files for devices."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any


def command(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Write a run's model as files."""
    parser.description = "Write a run's model as files for devices, compared with PyTorch."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: what was --out of `fit`")
    parser.add_argument("--format", choices=("onnx", "executorch"), default="onnx", help="(default: onnx)")
    parser.add_argument("--out", type=Path, help="folder of the files (default: RUN/export)")
    options = parser.parse_args(words[1:])
    export_run(options.run, options.out, options.format)


def export_run(run: Path, out: Path | None = None, kind: str = "onnx") -> list[Path]:
    """Write the model of a run's newest checkpoint as a file, and its frozen backbone, if it has one, as another.

    Args:
        run: The run's folder, with ``config.yaml`` and ``checkpoints``. Its data must be there, to compare on.
        out: Folder of the files; default: ``export`` in the run's folder.
        kind: ``"onnx"`` or ``"executorch"``.

    Returns:
        The files: ``classifier`` and ``backbone``, with the format's ending.

    Raises:
        ValueError: If the folder is no finished run's, or the checkpoint does not fit its recipe.
    """
    import torch
    from torch import nn

    from lightning_fcl.callbacks.base_session import BaseSession
    from lightning_fcl.cli.run import newest_checkpoint
    from lightning_fcl.cli.setting import read_setting
    from lightning_fcl.device.export import WithoutTrainer, export_executorch, export_onnx

    checkpoint = newest_checkpoint(run)
    if checkpoint is None or not (run / "config.yaml").is_file():
        raise ValueError(
            f"Expected {run} to be the folder of a run, with config.yaml and checkpoints, but it is none. Give what "
            "was `--out` of `lightning-fcl fit`."
        )
    setting = read_setting([run / "config.yaml"])
    module: Any = setting.module
    for callback in setting.callbacks:
        if callback["class_path"].endswith(".BaseSession"):
            BaseSession(**callback.get("init_args", {})).freeze(module.model)
    try:
        module.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"])
    except (RuntimeError, KeyError, EOFError, UnpicklingError) as error:
        raise ValueError(
            f"Expected {checkpoint} to be a whole checkpoint of {run / 'config.yaml'} but it is not: "
            f"{str(error).splitlines()[0]}"
        ) from error
    setting.stream.setup("test")
    example = setting.stream.take(setting.stream.plan.test[:8])[0]
    parts = {"classifier": WithoutTrainer(module)}
    if isinstance(getattr(getattr(module, "model", None), "backbone", None), nn.Module):
        parts["backbone"] = module.model.backbone
    write = export_onnx if kind == "onnx" else export_executorch
    folder, ending = out or run / "export", "onnx" if kind == "onnx" else "pte"
    files = []
    for name, part in parts.items():
        files.append(folder / f"{name}.{ending}")
        difference = write(part, example, files[-1])
        print(f"{files[-1]}  {files[-1].stat().st_size} bytes, at most {difference:.1e} from PyTorch")
    return files
