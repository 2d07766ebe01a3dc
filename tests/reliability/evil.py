"""Cases of evil files: what would be called, or never end."""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from campaign import Campaign, Command, Outcome, call, small_recipe

from lightning_fcl.running.rows import config_words
from recipes import changed_recipe

MARKER = "it-was-called"


class _Called:
    """What is called when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {MARKER}",)


COMMAND = {"class_path": "os.system", "init_args": {"command": f"touch {MARKER}"}}
LAUGHS = "\n".join(["a0: &a0 [0, 0]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])


def _text(text: str, *words: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "evil.yaml").write_text(text)
        return [*words, "evil.yaml"]

    return make


def _changed(**changes: object) -> Callable[[Path], list[str]]:
    """A quickstart in which something is said otherwise."""

    def make(folder: Path) -> list[str]:
        (folder / "evil.yaml").write_text(yaml.safe_dump(changed_recipe([]) | changes))
        return ["fit", "--config", "evil.yaml"]

    return make


def _checkpoint(change: Callable[[dict[str, Any]], object], command: str = "fit") -> Callable[[Path], list[str]]:
    """A checkpoint that this very recipe has written, changed."""

    def make(folder: Path) -> list[str]:
        words = config_words(small_recipe(folder))
        if call(["fit", *words, "--trainer.max_epochs", "1", "--out", "first"], folder).code:
            raise RuntimeError("the first fit failed")
        path = next((folder / "first/checkpoints").glob("*.ckpt"))
        torch.save(change(torch.load(path, weights_only=True)), folder / "evil.ckpt")
        return [command, *words, "--ckpt_path", "evil.ckpt"]

    return make


def _bytes(content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "evil.ckpt").write_bytes(content())
        return ["fit", *config_words(small_recipe(folder)), "--ckpt_path", "evil.ckpt"]

    return make


def _zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data.pkl", "w") as entry:
        for _ in range(512):
            entry.write(bytes(1 << 20))
    return buffer.getvalue()


def _first_weight(state: dict[str, Any], value: float) -> dict[str, Any]:
    name, tensor = next(iter(state["state_dict"].items()))
    return {**state, "state_dict": {**state["state_dict"], name: torch.full_like(tensor, value)}}


EVIL: dict[str, Callable[[Path], list[str]]] = {
    "aliases that multiply": _text(LAUGHS, "fit", "--config"),
    "a Python object in YAML": _text(f"x: !!python/object/apply:os.system [touch {MARKER}]", "fit", "--config"),
    "a recipe without an end": lambda folder: ["fit", "--config", "/dev/zero"],
    "a recipe that is a folder": lambda folder: ["fit", "--config", "."],
    "a command for an optimizer": _changed(
        model={"class_path": "lightning_fcl.Classifier", "init_args": {"num_classes": 10, "optimizer": COMMAND}}
    ),
    "a command for a callback": _changed(trainer={"callbacks": [COMMAND]}),
    "a command for data": _changed(data={"data": COMMAND}),
    "a pickle for a checkpoint": _bytes(lambda: pickle.dumps(_Called())),
    "an object in a checkpoint": _checkpoint(lambda state: {**state, "more": _Called()}),
    "an object in a checkpoint to test": _checkpoint(lambda state: {**state, "more": _Called()}, "test"),
    "a command in hyperparameters": _checkpoint(
        lambda state: {**state, "hyper_parameters": {"optimizer": COMMAND, "_class_path": "os.system"}}
    ),
    "an instantiator in hyperparameters": _checkpoint(
        lambda state: {**state, "hyper_parameters": {"_instantiator": "os.system", "command": f"touch {MARKER}"}},
        "test",
    ),
    "NaN for weights": _checkpoint(lambda state: _first_weight(state, math.nan)),
    "infinite weights to test": _checkpoint(lambda state: _first_weight(state, math.inf), "test"),
    "half a gigabyte of zeros in a small zip file": _bytes(_zip_bomb),
    "a checkpoint from afar": lambda folder: [
        *("fit", "--config", small_recipe(folder)[0], "--ckpt_path", "http://127.0.0.1:9/evil.ckpt")
    ],
}
"""Files, and the words of a command that is handed one."""


def evil_file(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """A command that is handed an evil file calls nothing, and ends: well, or with one message."""
    names = sorted(EVIL)
    what = names[int(folder.name.rpartition("-")[2]) % len(names)]
    ended = Command(folder, EVIL[what](folder)).end()
    if problem := ended.wrong(what, {0, 2}):
        return problem
    if called := list(folder.rglob(MARKER)):
        return Outcome("something called", what, str(called))
    return Outcome("fine", what)
