"""Data of one machine of a deployment: a file, a folder of images or a data module. Classes are identified by name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import quote

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fcl import __version__
from lightning_fcl.data.adapters import samples_from_arrays, samples_in
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.data.datamodule_adapter import check_no_hooks, delegate_hooks
from lightning_fcl.data.datasets.arrays import check_scale
from lightning_fcl.data.datasets.images import read_image
from lightning_fcl.data.datasets.readers import ANY_SIZE, check_arrays, read_arrays
from lightning_fcl.data.labels import check_names, label_indices
from lightning_fcl.data.samples import Samples, data_name
from lightning_fcl.data.scenarios import EMPTY, DomainIncremental, IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.tables import SUFFIXES, Table
from lightning_fcl.deployment.messages import RejectedMessageError
from lightning_fcl.deployment.node_recipe import ClientOutline, client_plan, dealt_by, server_plan, table_in
from lightning_fcl.errors import InvalidValueError, LightningFCLError, MissingValueError, UnknownNameError
from lightning_fcl.io.atomic import atomic_path, write_atomic
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import LIMIT, read_note
from lightning_fcl.library_errors import one_line
from lightning_fcl.validation import did_you_mean, require_package

_WANTED: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("iuf", ("n", ANY_SIZE)),
    "y": ("biufU", ("n", ANY_SIZE)),
    "group": ("iuU", ("n",)),
    "classes": ("U", ("classes",)),
    "mean": ("f", (ANY_SIZE,)),
    "std": ("f", (ANY_SIZE,)),
    "rounds": ("biu", ("n", "rounds")),
    "part": ("U", ("n",)),
}
_MEND = (
    "Write the file with `numpy.savez(path, x=x.astype(numpy.float32), y=labels.astype(str))`, or with "
    "`lightning-fcl deploy split`."
)
_PARTS = ("test", "validation")


@dataclass(frozen=True)
class DataSource:
    """The source of a machine's data, and the arguments to read it.

    Args:
        where: An ``.npz`` file, a CSV or parquet file, a folder that contains one folder of images per class, or a
            LightningDataModule, for example ``"my_data:Sensors"``. An ``.npz`` file contains ``x``, shape (n, ...), and
            ``y``. The array ``y`` contains class names of shape (n,), or numbers of shape (n, ...) that are not
            classes. Optional arrays are ``group`` (the domain of each sample), ``classes`` (all class names in their
            order), and ``mean`` and ``std`` (to normalize uint8 images). The optional arrays ``rounds`` and ``part``
            are the ``rounds`` and the ``split_names`` of `NodeData`.
        table: Arguments of `Table` for a CSV or parquet file, without the path of the file.
        init_args: Arguments of the data module.
        classes: Names of the classes of a table or a data module, as in `FederatedStream`.
    """

    where: str
    table: Mapping[str, Any] = field(default_factory=dict)
    init_args: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None

    def with_recipe(self, recipe: Mapping[str, Any]) -> DataSource:
        """Return this source with the recipe's class names, and with the recipe's values of missing table arguments."""
        classes = recipe["data"].get("classes")
        table = {**table_in(recipe["data"].get("data")), **self.table}
        return replace(self, table=table, classes=None if classes is None else tuple(classes))


@dataclass(frozen=True, eq=False)
class NodeData:
    """The data of one machine.

    Args:
        samples: On a node, the training samples. On a server, the samples of all splits.
        rounds: For each sample and round, whether the sample belongs to the round, shape (n, rounds). Default: the
            classes or domains of the scenario determine the samples of a round.
        split_names: Split of each sample on a server, shape (n,). The server uses ``"test"`` and ``"validation"``.
            Default: all samples are test samples.
        module: Data module that the samples come from.
    """

    samples: Samples
    rounds: NDArray[np.bool_] | None = None
    split_names: NDArray[Any] | None = None
    module: L.LightningDataModule | None = None

    def delegate_hooks(self, stream: FederatedStream) -> None:
        """Make a stream use the transfer hooks of the data module. Do nothing if there is no data module."""
        if self.module is not None:
            stream.data = self.module
            delegate_hooks([self.module], stream, is_prepared=True)


def read_data(source: DataSource | str | Path, seed: int = 0, for_server: bool = False) -> NodeData:
    """Read the data of one machine.

    Args:
        source: Source of the data.
        seed: Seed of the random numbers in a data module.
        for_server: Whether the data is the test data of a server. Otherwise, it is the training data of a node.

    Raises:
        RejectedMessageError: If the data is missing or invalid.
    """
    source = source if isinstance(source, DataSource) else DataSource(str(source))
    path = Path(source.where)
    try:
        if path.suffix == ".npz":
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path.resolve()}")
            return _read_npz(path, for_server)
        if path.suffix in SUFFIXES:
            return NodeData(_read_table(source))
        if path.is_dir():
            torchvision = require_package("torchvision", "reads folders of images")
            image_folder = torchvision.datasets.ImageFolder(
                path,
                # The values of the tensors are scaled to [0, 1].
                transform=torchvision.transforms.functional.to_tensor,
                # `to_tensor` needs a writable array, so the image is copied.
                loader=lambda file: read_image(Path(file), None, "RGB").copy(),
            )
            x, y = concat_nested([[image[None], torch.tensor([label])] for image, label in image_folder])
            return NodeData(Samples(x, y.numpy(), tuple(image_folder.classes)))
        if ":" in source.where:
            module_class = resolve_name(source.where)
            if isinstance(module_class, type) and issubclass(module_class, L.LightningDataModule):
                return _read_module(module_class(**source.init_args), source, seed, for_server)
        raise FileNotFoundError(f"there is no file, folder or LightningDataModule at {source.where}")
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        if isinstance(error, LightningFCLError):
            raise RejectedMessageError(
                f"Expected usable data at {source.where}. {error}",
                argument=error.argument or "data",
                value=error.value,
            ) from error
        raise RejectedMessageError(
            f"Expected usable data at {source.where}, but reading the data failed: {one_line(error)}.",
            # If the file exists, the error describes a problem of its content.
            hint=""
            if path.is_file()
            else "Set `data` to a file, a folder of images, or a DataModule with its arguments. For example: "
            'data="a.npz", or data="my_data:Sensors" init_args.folder="/data".',
            argument="data",
        ) from error


def count_samples(source: DataSource | str, cache_file: Path, seed: int = 0) -> int:
    """Return the number of a machine's training samples.

    The number of samples of unchanged files is read from ``cache_file``. A data module is loaded in each call.

    Args:
        source: Source of the data.
        cache_file: JSON file that stores the number of samples, and a hash that includes the names, sizes and times of
            the files.
        seed: Seed of the random numbers in a data module.
    """
    source = source if isinstance(source, DataSource) else DataSource(source)
    path = Path(source.where)
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    file_stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    stamp = hashlib.sha256(repr((__version__, os.environ.get(LIMIT), source, file_stats)).encode()).hexdigest()
    noted = read_note(cache_file)
    if not files or noted.get("stamp") != stamp or not isinstance(noted.get("samples"), int):
        noted = {"stamp": stamp, "samples": len(read_data(source, seed).samples)}
        write_atomic(cache_file, json.dumps(noted))
    return int(noted["samples"])


def _read_module(module: L.LightningDataModule, source: DataSource, seed: int, for_server: bool) -> NodeData:
    """Read the training samples of a data module on a node, and the samples of all splits on a server."""
    module.prepare_data()
    splits = ("test", "validation", "train") if for_server else ("train",)
    samples = samples_in(module, splits, seed, source.classes)
    split_names = np.full(len(samples), "train", dtype="U10")
    for name, rows in (("validation", samples.validation), ("test", samples.test)):
        if rows is not None:
            split_names[rows] = name
    return NodeData(samples, split_names=split_names, module=module)


def _read_table(source: DataSource) -> Samples:
    missing = [name for name in ("target", "features") if not source.table.get(name)]
    if missing:
        raise MissingValueError(
            f"Expected column names in {' and '.join(f'`{name}`' for name in missing)}, but got none.",
            hint=f'Set them next to `data`, for example data="{source.where}" target="label" features="a,b,c".',
            argument=missing[0],
        )
    table = Table(source.where, **source.table)
    return samples_from_arrays(table.x, table.targets, classes=source.classes)


def _read_npz(path: Path, for_server: bool) -> NodeData:
    arrays = read_arrays(path, _WANTED, _MEND)
    if "x" not in arrays or "y" not in arrays:
        raise ValueError(f"it contains {', '.join(arrays) or 'nothing'}, not `x` and `y`. {_MEND}")
    check_arrays(path, arrays, {name: _WANTED[name] for name in arrays}, _MEND)
    x, y = torch.from_numpy(np.ascontiguousarray(arrays["x"], arrays["x"].dtype.newbyteorder("="))), arrays["y"]
    if not len(x):
        raise ValueError("it contains 0 samples. Write at least one sample to `x` and `y`")
    if x.is_floating_point() and not torch.isfinite(x).all():
        raise ValueError("`x` contains non-finite values. Correct or drop these samples")
    _check_part(path, arrays.get("part"), for_server)
    classes = tuple(map(str, arrays["classes"])) if "classes" in arrays else ()
    if y.dtype.kind == "U":
        classes = classes or tuple(np.unique(y).tolist())
        y = label_indices(y, classes, "the labels of its data")
    elif y.dtype.kind in "biu" and y.ndim == 1:
        raise ValueError("`y` contains class numbers, which can differ between machines. Write class names as text")
    if "group" in arrays:
        check_names(np.unique(arrays["group"]).astype(str).tolist(), "group")
    scale = None
    if "mean" in arrays or "std" in arrays:
        mean, std = (arrays[name].astype(np.float32) if name in arrays else None for name in ("mean", "std"))
        check_scale(mean, std, tuple(x.shape[1:]))
        scale = (torch.from_numpy(mean), torch.from_numpy(std))
    samples = Samples(x, y, classes, group=arrays.get("group"), scale=scale)
    rounds = arrays["rounds"].astype(bool) if "rounds" in arrays else None
    return NodeData(samples, rounds, arrays.get("part"))


def _check_part(path: Path, split: NDArray[Any] | None, for_server: bool) -> None:
    """Raise an error if a node's file has the array ``part``, or if the array has an invalid value on the server."""
    if split is None:
        return
    if not for_server:
        raise InvalidValueError(
            f"Expected training data, but {path} has the array `part`, which only the test data of a server has.",
            hint="Set `data` to the file with the training data of this client.",
            argument="data",
        )
    for row in np.flatnonzero(~np.isin(split, _PARTS))[:1]:
        raise UnknownNameError(
            f'Expected `part` of {path} to be "test" or "validation" for each sample, but got "{split[row]}" for '
            f"sample {row}.",
            hint=did_you_mean(split[row], _PARTS) or "Remove the samples that the server does not use.",
            argument="part",
            value=str(split[row]),
        )


def set_node_data(stream: FederatedStream, node_data: NodeData, outline: ClientOutline) -> None:
    """Set the samples and the plan of a node's stream, from the node's data and the server's outline.

    Args:
        stream: Stream of the node.
        node_data: Data of the node.
        outline: The server's outline of the client's rounds.

    Raises:
        ValueError: If the targets, classes, domains or rounds of the data do not match the outline.
    """
    samples, owner = node_data.samples, f"client {outline.client}"
    targets: IntArray = samples.targets
    if bool(samples.classes) != bool(outline.classes):
        expected_type, actual_type = ("classes", "numbers") if outline.classes else ("numbers", "classes")
        hint = "Write `classes: []` below `data` of the recipe if whole numbers are not classes."
        if outline.classes:
            hint = "Name the column of the classes in `target`, or write the names of classes as targets."
        raise RejectedMessageError(
            f"Expected the targets of {owner} to be {expected_type}, as on the server, but got {actual_type}.",
            hint=hint,
            argument="target",
        )
    if samples.classes:
        targets = label_indices(np.array(samples.classes)[samples.targets], outline.classes, f"the labels of {owner}")
    groups = targets if outline.groups_are_classes else np.zeros(len(samples), dtype=np.int64)
    if outline.groups and not outline.groups_are_classes and outline.is_partitioned and node_data.rounds is None:
        groups = label_indices(_domains_of(samples, owner).astype(str), outline.groups, f"the domains of {owner}")
    stream.plan = client_plan(outline, groups, node_data.rounds, stream.seed)
    node_data.delegate_hooks(stream)
    stream.set_samples(replace(samples, targets=targets, classes=outline.classes))


def _domains_of(samples: Samples, owner: str) -> NDArray[Any]:
    """Return the domain of each sample. Raise MissingValueError if the data has no domains."""
    if samples.group is None:
        raise MissingValueError(
            f"Expected `group`, the domain of each sample, in the data of {owner}, but got none.",
            hint="Write the data to an .npz file with `group`, or use `ClassIncremental` in the recipe.",
            argument="group",
        )
    return samples.group


def set_server_data(stream: FederatedStream, data: NodeData, clients: Sequence[str]) -> None:
    """Set the samples and the plan of a server's stream. In the plan, the clients have tasks but no samples.

    Args:
        stream: Stream of the server.
        data: Data of the server.
        clients: Names of the clients.

    Raises:
        InvalidValueError: If the scenario assigns single samples to rounds.
        MissingValueError: If the data has no test samples, or no domains for a domain-incremental scenario.
    """
    scenario, samples = dealt_by(stream.scenario), data.samples
    if scenario is None:
        raise InvalidValueError(
            f"Expected `Stationary`, `ClassIncremental` or `DomainIncremental` for a server with `data`, but got "
            f"{stream.scenario}, which assigns single samples to rounds.",
            hint="Leave `data` and `clients` out. Start each node with its file of `lightning-fcl deploy split` as "
            "`data`, and with the client's name in the recipe as `client`.",
            argument="data",
        )
    if isinstance(scenario, DomainIncremental):
        _domains_of(samples, "the server")
    stream.plan = server_plan(scenario, samples, data.split_names, clients, stream.seed)
    if not len(stream.plan.test):
        raise MissingValueError(
            "Expected `data` of the server to have test samples, but got none.",
            hint='Write "test" as `part` of some samples, or give the data module a `test_dataloader` with samples.',
            argument="data",
        )
    data.delegate_hooks(stream)
    stream.set_samples(samples)


def write_split(stream: FederatedStream, folder: Path) -> list[Path]:
    """Write the training samples of each client, and the server's test and validation samples, to separate files.

    Args:
        stream: The stream.
        folder: Folder of the files.

    Returns:
        The paths of the files. The server's file is the first one.

    Raises:
        InvalidValueError: If the stream has transfer hooks, if the recipe does not set the data loader settings of a
            data module, if a sample is not a pair of tensors, or if a client is named "server".
        MissingValueError: If the stream has neither test nor validation samples, or if a client has no samples.
    """
    check_no_hooks("nodes that have their samples as files", stream.data, stream)
    stream.setup("fit")
    missing = [name for name in stream.inferred_settings if name != "num_workers"]
    if stream.samples.loader_configs and missing:
        raise InvalidValueError(
            f"Expected the recipe to set {', '.join(f'`{name}`' for name in missing)}, because the files of nodes do "
            f"not contain the data loader settings of {data_name(stream.data)}.",
            hint=f"Write `{missing[0]}: {str(getattr(stream, missing[0])).lower()}`.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    plan = stream.plan
    split_names = np.repeat(["test", "validation"], [len(plan.test), len(plan.validation)])
    tested = np.concatenate([plan.test, plan.validation])
    files = [_write(stream, folder / "server.npz", tested, part=split_names)]
    for client in plan.clients:
        rows = [current.get(client, EMPTY) for current in plan.train]
        client_rows = np.unique(np.concatenate(rows))
        rounds = np.stack([np.isin(client_rows, some) for some in rows], axis=1)
        files.append(_write(stream, split_file(folder, client), client_rows, rounds=rounds))
    return files


def split_file(folder: Path, client: str) -> Path:
    """Return the path of a client's file in a folder of `write_split`.

    Raises:
        InvalidValueError: If the client is named "server", in any letter case, like the server's file ``server.npz``.
    """
    if client.casefold() == "server":
        raise InvalidValueError(
            f"Expected a client name other than `server` (in any letter case), because the server's file has this "
            f"name, but got {client}.",
            hint="Rename the client.",
            argument="client",
            value=client,
        )
    return safe_join(folder, f"{quote(client, safe=' ')}.npz")


def _write(stream: FederatedStream, path: Path, rows: IntArray, **columns: NDArray[Any]) -> Path:
    samples = stream.samples
    if not len(rows):
        raise MissingValueError(
            f"Expected samples to write to {path}, but there are none.",
            hint="Increase `test` of `split` in the recipe."
            if "part" in columns
            else "Use fewer clients, so that each client has training samples.",
        )
    pair = samples.get_stored(rows)
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, torch.Tensor) for one in pair)):
        raise InvalidValueError(
            "Expected each sample to be a pair of an input tensor and a target tensor, but got another structure.",
            hint="Give each node a DataModule instead.",
        )
    arrays = {"x": pair[0].numpy(), "y": pair[1].numpy(), **columns}
    if samples.classes:
        arrays |= {"y": np.array(samples.classes)[samples.targets[rows]], "classes": np.array(samples.classes)}
    if samples.group is not None:
        arrays["group"] = samples.group[rows].astype(str)
    if samples.scale is not None and samples.pixel_encoding is not None:
        arrays |= {name: part.numpy() for name, part in zip(("mean", "std"), samples.scale, strict=True)}
    with atomic_path(path) as part_file, part_file.open("wb") as file:
        np.savez(file, **arrays)
    return path
