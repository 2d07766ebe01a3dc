"""The data of one machine: a file, a folder of images or a DataModule, with labels by the names of their classes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import quote

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fcl import __version__
from lightning_fcl.data.batches import joined
from lightning_fcl.data.data_module import lend_hooks, refuse_hooks
from lightning_fcl.data.datasets.arrays import check_scale
from lightning_fcl.data.datasets.files import ANY, check_arrays, read_arrays
from lightning_fcl.data.datasets.images import read_image
from lightning_fcl.data.own import samples_of
from lightning_fcl.data.samples import Samples, name_of
from lightning_fcl.data.scenarios import EMPTY, ClassIncremental, DomainIncremental, IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.targets import numbers_of
from lightning_fcl.deployment.messages import RefusedError
from lightning_fcl.deployment.outline import Outline, client_plan, server_plan
from lightning_fcl.errors import InvalidValueError, LightningFCLError, MissingValueError, require
from lightning_fcl.io.atomic import replacing, write_whole
from lightning_fcl.io.paths import inside
from lightning_fcl.io.reading import LIMIT, read_note
from lightning_fcl.library_errors import one_line

_WANTED: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("iuf", ("n", ANY)),
    "y": ("biufU", ("n", ANY)),
    "group": ("iuU", ("n",)),
    "classes": ("U", ("classes",)),
    "mean": ("f", (ANY,)),
    "std": ("f", (ANY,)),
    "rounds": ("biu", ("n", "rounds")),
    "part": ("U", ("n",)),
}
_MEND = "Write it with `numpy.savez(path, x=..., y=...)`, or `lightning-fcl deploy split`."


@dataclass(frozen=True, eq=False)
class OwnData:
    """The data of one machine.

    Args:
        rounds: Whether each sample is of each round, shape (n, rounds); None: their classes or domains say so.
        part: What each sample is for, ``"test"`` or ``"validation"``, shape (n,), on a server; None: ``"test"``.
    """

    samples: Samples
    rounds: NDArray[np.bool_] | None = None
    part: NDArray[Any] | None = None
    module: L.LightningDataModule | None = None

    def lend_hooks(self, stream: FederatedStream) -> None:
        if self.module is not None:
            stream.data = self.module
            lend_hooks([self.module], stream, prepared=True)


def read_data(where: str | Path) -> OwnData:
    """The data of one machine.

    Args:
        where: An ``.npz`` file with ``x``, shape (n, ...), and ``y``, shape (n,), names of classes, or numbers that are
            none; and perhaps ``group``, the names of domains, ``classes``, all names in their order, ``mean`` and
            ``std`` of uint8 images, ``rounds`` and ``part``, as `OwnData` has them. Or a folder with a folder of images
            for each class. Or a LightningDataModule, as in ``"my_data:Sensors"``.
    """
    path = Path(where)
    try:
        if path.suffix == ".npz":
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path.resolve()}")
            return _read_file(path)
        if path.is_dir():
            torchvision = require("torchvision", "reads folders of images")
            found = torchvision.datasets.ImageFolder(
                path,
                transform=torchvision.transforms.functional.to_tensor,  # scaled to [0, 1]
                loader=lambda file: read_image(Path(file), None, "RGB").copy(),  # a tensor may be written to
            )
            x, y = joined([[image[None], torch.tensor([label])] for image, label in found])
            return OwnData(Samples(x, y.numpy(), tuple(found.classes)))
        if ":" in str(where):
            made = resolve_name(str(where))
            if isinstance(made, type) and issubclass(made, L.LightningDataModule):
                module = made()
                module.prepare_data()
                return OwnData(samples_of(module), module=module)
        raise FileNotFoundError(f"there is no such file or folder, nor a DataModule, at {where}")
    except (OSError, ValueError, ImportError, AttributeError) as error:
        if isinstance(error, LightningFCLError):
            raise RefusedError(
                f"Expected usable data of this node at {where}. {error}", argument=error.argument, value=error.value
            ) from error
        raise RefusedError(
            f"Expected the data of this node at {where} but {one_line(error)}.",
            hint="Name an .npz file, a folder of images, or a DataModule, in its node config: "
            '--node-config \'client="a" data="a.npz"\'.',
        ) from error


def count_samples(where: str, note: Path) -> int:
    """How many samples a machine has; a note is kept of files that could be read, until they change."""
    path = Path(where)
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    seen = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    stamp = hashlib.sha256(repr((__version__, os.environ.get(LIMIT), seen)).encode()).hexdigest()
    noted = read_note(note)
    if not files or noted.get("stamp") != stamp or not isinstance(noted.get("samples"), int):
        noted = {"stamp": stamp, "samples": len(read_data(where).samples)}
        write_whole(note, json.dumps(noted))
    return int(noted["samples"])


def _read_file(path: Path) -> OwnData:
    read = read_arrays(path, _WANTED)
    if "x" not in read or "y" not in read:
        raise ValueError(f"it holds {', '.join(read) or 'nothing'}, not `x` and `y`. {_MEND}")
    check_arrays(path, read, {name: _WANTED[name] for name in read}, _MEND)
    x, y = torch.from_numpy(np.ascontiguousarray(read["x"])), read["y"]
    if not len(x):
        raise ValueError(f"it holds 0 samples. {_MEND}")
    if x.is_floating_point() and not torch.isfinite(x).all():
        raise ValueError("`x` holds numbers that are not finite. Mend or drop these samples")
    classes = tuple(map(str, read["classes"])) if "classes" in read else ()
    if y.dtype.kind == "U":
        classes = classes or tuple(np.unique(y).tolist())
        y = numbers_of(y, classes, "the labels of its data")
    elif y.dtype.kind in "biu" and y.ndim == 1:
        raise ValueError("`y` holds numbers, which may be others elsewhere: write the names of classes, as text")
    scale = None
    if "mean" in read or "std" in read:
        mean, std = (read[name].astype(np.float32) if name in read else None for name in ("mean", "std"))
        check_scale(mean, std, tuple(x.shape[1:]))
        scale = (torch.from_numpy(mean), torch.from_numpy(std))
    samples = Samples(x, y, classes, group=read.get("group"), scale=scale)
    rounds = read["rounds"].astype(bool) if "rounds" in read else None
    return OwnData(samples, rounds, read.get("part"))


def take_data(stream: FederatedStream, data: OwnData, outline: Outline) -> None:
    """Let a stream be that of a node: its own samples, and the rounds that the server has told."""
    samples, whose = data.samples, f"client {outline.client}"
    targets: IntArray = samples.targets
    if bool(samples.classes) != bool(outline.classes):
        raise RefusedError(
            f"Expected targets of {whose} that are {'classes' if outline.classes else 'numbers'}, as the server's are, "
            "but got others."
        )
    if samples.classes:
        targets = numbers_of(np.array(samples.classes)[samples.targets], outline.classes, f"the labels of {whose}")
    groups = targets if outline.of_classes else np.zeros(len(samples), dtype=np.int64)
    if not outline.of_classes and outline.groups and samples.group is not None:
        groups = numbers_of(samples.group.astype(str), outline.groups, f"the domains of {whose}")
    stream.plan = client_plan(outline, groups, data.rounds, stream.seed)
    data.lend_hooks(stream)
    stream.hold(replace(samples, targets=targets, classes=outline.classes))


def take_server_data(stream: FederatedStream, data: OwnData, clients: Sequence[str]) -> None:
    """Let a stream be that of a server, which has samples to test on, and knows the clients' names alone."""
    scenario, samples = stream.scenario, data.samples
    if not isinstance(scenario, ClassIncremental | DomainIncremental):
        raise InvalidValueError(
            f"Expected a scenario of classes or domains for a server with data of its own but got {scenario}, which "
            "deals samples out one by one.",
            hint="Leave `data` of the server out to test on the recipe's data.",
        )
    stream.plan = server_plan(scenario, samples, data.part, clients, stream.seed)
    data.lend_hooks(stream)
    stream.hold(samples)


def write_split(stream: FederatedStream, folder: Path) -> list[Path]:
    """Write what each client of a stream would have, and what its server tests on, each to a file of its own."""
    refuse_hooks("nodes that have them as files", stream.data, stream)
    stream.setup("fit")
    missing = [name for name in stream.left_open if name != "num_workers"]
    if stream.samples.loaders and missing:
        raise InvalidValueError(
            f"Expected the recipe to name {', '.join(f'`{name}`' for name in missing)} for nodes that have samples "
            f"and no loaders of {name_of(stream.data)}.",
            hint=f"Write `{missing[0]}: {str(getattr(stream, missing[0])).lower()}`.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    plan = stream.plan
    part = np.repeat(["test", "validation"], [len(plan.test), len(plan.validation)])
    tested = np.concatenate([plan.test, plan.validation])
    files = [_write(stream, folder / "server.npz", tested, part=part)]
    for client in plan.clients:
        rows = [current.get(client, EMPTY) for current in plan.train]
        own = np.unique(np.concatenate(rows))
        rounds = np.stack([np.isin(own, some) for some in rows], axis=1)
        files.append(_write(stream, split_file(folder, client), own, rounds=rounds))
    return files


def split_file(folder: Path, client: str) -> Path:
    if client.casefold() == "server":
        raise InvalidValueError(
            f"Expected a client by another name than the server's file but got {client}.",
            hint="Rename the client.",
            argument="client",
            value=client,
        )
    return inside(folder, f"{quote(client, safe=' ')}.npz")


def _write(stream: FederatedStream, path: Path, rows: IntArray, **columns: NDArray[Any]) -> Path:
    samples = stream.samples
    if not len(rows):
        raise MissingValueError(
            f"Expected samples to write to {path} but there are none.", hint="Increase `test` of `split` in the recipe."
        )
    pair = samples.stored(rows)
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, torch.Tensor) for one in pair)):
        raise InvalidValueError(
            "Expected samples and targets that are arrays to write a split.",
            hint="Give each node a DataModule instead.",
        )
    found = {"x": pair[0].numpy(), "y": pair[1].numpy(), **columns}
    if samples.classes:
        found |= {"y": np.array(samples.classes)[samples.targets[rows]], "classes": np.array(samples.classes)}
    if samples.group is not None:
        found["group"] = samples.group[rows].astype(str)
    if samples.scale is not None and samples.pixels is not None:
        found |= {name: part.numpy() for name, part in zip(("mean", "std"), samples.scale, strict=True)}
    with replacing(path) as part_file, part_file.open("wb") as file:
        np.savez(file, **found)
    return path
