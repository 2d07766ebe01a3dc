"""Fault-injection cases with damaged files: changed bytes, copied run folders, and files that are not usable."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import yaml
from campaign import Campaign, Outcome, call, comes_to, same, small_recipe

from lightning_fcl.runs.recipe import Recipe


def change_byte(path: Path, rng: random.Random) -> str:
    """Change one random byte of a file, and return a description of the change."""
    content = bytearray(path.read_bytes())
    place, old = rng.randrange(len(content)), 0
    old = content[place]
    content[place] = rng.choice([value for value in range(256) if value != old])
    path.write_bytes(content)
    return f"{path.name}, byte {place} of {len(content)} from {old} to {content[place]}"


def checkpoint_byte(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Change one byte of a checkpoint and resume from the checkpoint.

    The fit must raise an error or have the same results.
    """
    words = Recipe(tuple(map(Path, small_recipe(folder)))).words
    half = campaign.once("half", lambda place: _half_way(words, place))
    checkpoint = folder / "half.ckpt"
    checkpoint.write_bytes((half / "half.ckpt").read_bytes())
    what = change_byte(checkpoint, rng)
    said = call(["fit", *words, "--out", "out", "--ckpt_path", str(checkpoint)], folder)
    if problem := said.wrong(what):
        return problem
    if said.code == 2:
        return Outcome("fine", what)
    return same(comes_to(half), comes_to(folder), what)


def _half_way(words: list[str], place: Path) -> None:
    keep = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"save_top_k": -1, "dirpath": "all"},
    }
    (place / "keep.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [keep]}}))
    _run(["fit", *words, "--config", "keep.yaml", "--out", "out"], place)
    first = min((place / "all").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    first.rename(place / "half.ckpt")
    _run(["fit", *words, "--out", "again", "--ckpt_path", "half.ckpt"], place)
    shutil.rmtree(place / "out")
    (place / "again").rename(place / "out")


def results_byte(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Change one byte in a file of a finished search, and run the search again.

    The command must stop with an error message or have the same results.
    """
    done = campaign.once("search", _search)
    shutil.copytree(done, folder, dirs_exist_ok=True)
    files = sorted(path for path in (folder / "out").rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    what = f"{path.relative_to(folder)}: {change_byte(path, rng)}"
    said = call(["tune", "search.yaml", "--workers", "1", "--out", "out"], folder)
    if problem := said.wrong(what):
        return problem
    if said.code == 2:
        return Outcome("fine", what)
    return same(comes_to(done), comes_to(folder), what)


def copied_run(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Copy the folder of a run, and resume the copy.

    The files of the copy have random times. Some copies have additional bytes at the end of the record.
    """
    words = Recipe(tuple(map(Path, small_recipe(folder)))).words
    whole = campaign.once("whole", lambda place: _run(["fit", *words, "--out", "out"], place))
    begun = campaign.once(
        "begun", lambda place: _run(["fit", *words, "--out", "first", "--trainer.max_epochs", "2"], place)
    )
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    name = rng.choice(["out", "a b/out", "checkpoints/out"])
    copy = folder / name
    shutil.copytree(begun / "first", copy)
    for path in copy.rglob("*"):
        os.utime(path, (moment := rng.uniform(1e9, 2e9), moment))
    record = copy / "record.jsonl"
    record.write_bytes(record.read_bytes() + rng.choice([b"", b"{", b'{"round": 2}\n', rng.randbytes(100)]))
    what = f"copied to {name}, {record.stat().st_size} bytes of record"
    here = rng.choice([folder, copy.parent, copy])
    said = call(["fit", os.path.relpath(copy, here), "--trainer.max_epochs", "4"], here)
    if problem := said.wrong(what):
        return problem
    if said.code or {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} != before:
        return Outcome("silent difference" if not said.code else "wrong ending", what, said.text)
    return same(comes_to(whole), comes_to(copy.parent), what)


def unusable_file(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Replace a file of a run by a named pipe, a device or an empty file, and resume the run."""
    words = Recipe(tuple(map(Path, small_recipe(folder)))).words
    whole = campaign.once("whole", lambda place: _run(["fit", *words, "--out", "out"], place))
    begun = campaign.once(
        "begun", lambda place: _run(["fit", *words, "--out", "first", "--trainer.max_epochs", "2"], place)
    )
    shutil.copytree(begun / "first", folder / "out")
    path = rng.choice(sorted(path for path in (folder / "out").rglob("*") if path.is_file()))
    path.unlink()
    kind = rng.choice(["pipe", "device", "empty"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
    what = f"{path.relative_to(folder)} is replaced: {kind}"
    said = call(["fit", "out", "--trainer.max_epochs", "4"], folder)
    if problem := said.wrong(what):
        return problem
    return Outcome("fine", what) if said.code else same(comes_to(whole), comes_to(folder), what)


def _run(words: list[str], place: Path) -> None:
    said = call(words, place)
    if said.code:
        raise RuntimeError(said.text)


def _search(place: Path) -> None:
    recipes = small_recipe(place)
    lr = {"model.init_args.optimizer.init_args.lr": [0.1, 0.05]}
    content = {"configs": recipes, "objective": "final_accuracy/server", "sampler": "grid", "space": lr}
    (place / "search.yaml").write_text(yaml.safe_dump(content))
    _run(["tune", "search.yaml", "--workers", "1", "--out", "out"], place)
