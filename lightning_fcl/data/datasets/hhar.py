"""HHAR: six activities of nine people, recorded by four phones and two watches that sense each in its own way.

Stisen et al. 2015, "Smart devices are different: assessing and mitigating mobile sensing heterogeneities for activity
recognition", SenSys. Two layouts are read, in this order: the publishers' folder ``Activity recognition exp`` of four
CSV files, and ``hhar_phone/windows.npz``, a part with the accelerometer of one phone in windows of 128 steps.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import Arrays, Description, data_root
from lightning_fcl.data.datasets.archives import read_npz
from lightning_fcl.data.datasets.series import Normalize, cut, normalized, require_chunk, require_normalize

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DESCRIPTION", "DEVICES", "fetch", "load", "locate", "statistics"]

DESCRIPTION = Description(
    name="hhar",
    content="accelerometer and gyroscope of phones and watches, 6 activities, 9 people, in chunks of 2 s",
    licence="CC BY 4.0 (the authors ask for citation)",
    citation="Stisen et al.: Smart devices are different (mobile sensing heterogeneities). SenSys 2015",
    url="https://archive.ics.uci.edu/dataset/344/heterogeneity+activity+recognition",
    size="0.8 GB, 3.4 GB unpacked",
)

# The models of De Caro et al. 2023 in the order of their experiences.
DEVICES = ("nexus4", "s3", "s3mini", "lgwatch")

_MODELS = {"nexus4": "Phones", "s3": "Phones", "s3mini": "Phones", "samsungold": "Phones"}
_MODELS |= {"gear": "Watch", "lgwatch": "Watch"}
_CLASSES = ("bike", "sit", "stairsdown", "stairsup", "stand", "walk")
_USERS = tuple("abcdefghi")
_SENSORS = ("accelerometer", "gyroscope")
_COLUMNS = {"Creation_Time": "int64", "x": "float32", "y": "float32", "z": "float32"}
_COLUMNS |= {"User": "category", "Model": "category", "Device": "category", "gt": "category"}
_FOLDER = "Activity recognition exp"
_WINDOW = 128
_SLIDING = 200
_GAP = 0.5
_REMEDY = "Delete this copy and unpack the publishers' archive again."

_Layout = Literal["CSV files", "phone windows"]
# Time in ns, xyz and label of one sensor of one device on one person.
_Sensor = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
_Owner = tuple[str, str, str]


def load(
    root: str | Path | None = None,
    chunk: int | None = None,
    rate: float = 100.0,
    devices: Sequence[str] | None = None,
    features: Literal["raw", "statistics"] = "raw",
    normalize: Normalize = "user",
) -> Arrays:
    """Load the labelled motion of the devices, cut into chunks that do not overlap.

    Accelerometer and gyroscope of a device are brought to one regular grid by linear interpolation between neighbours
    by ``Creation_Time``, never across more than half a second nor between two activities. Every chunk lies inside one
    such stretch. Chunks are ordered by user, then by device, then by time.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.
        chunk: Time steps per chunk: 200 in De Caro et al. 2023, 500 in Bacciu et al. 2021. It must divide 128 for
            ``windows.npz``. None is 200, and 128 there.
        rate: Samples per second after interpolation.
        devices: Models among nexus4, s3, s3mini, samsungold, gear and lgwatch, in the order of the groups; None is
            nexus4, s3, s3mini, lgwatch, those of De Caro et al. 2023.
        features: ``"raw"``: accelerometer xyz, then gyroscope xyz. ``"statistics"``: 32 features, see `statistics`.
        normalize: ``"user"`` is the paper's z-score per user, device and feature over all kept samples: it looks into
            the future. ``"causal"`` takes mean and standard deviation of the chunks before a chunk; the first chunk
            has no past and is scaled with its own. ``"none"`` leaves the units. A feature that has not varied is only
            centred.

    Returns:
        `x` of shape (n, chunk, features), time first; `client` the user, "a" to "i"; `group` the place of the model in
        `devices`, None for ``windows.npz``.

    Raises:
        FileNotFoundError: If no layout is found, or one file of it is missing.
        ValueError: If an argument is unknown, does not fit the layout or leaves no chunk, or if a file is damaged; the
            message names the file.

    Warns:
        UserWarning: If a device of a user leaves no chunk; the others are kept.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> x = np.random.default_rng(0).normal(size=(2, 3, 128)).astype(np.float32)
        >>> np.savez(root / "windows.npz", X=x, y=[0, 5], user=[0, 8])
        >>> data = load(root, chunk=64)
        >>> data.x.shape, data.client.tolist()
        ((4, 64, 3), ['a', 'a', 'i', 'i'])
    """
    chosen = _require_options(rate, devices, features, normalize)
    layout, path = _find(data_root(root))
    if chunk is None:
        chunk = _WINDOW if layout == "phone windows" else 200
    require_chunk(chunk)
    if layout == "phone windows":
        return _load_windows(path, chunk, devices, features, normalize)
    x, y, client, group = [], [], [], []
    longest = 0
    for (user, model, device), recording, labels in _recordings(path, chosen, rate):
        longest = max(longest, max(map(len, recording), default=0))
        described = [statistics(part) for part in recording] if features == "statistics" else recording
        pieces = [cut(part, np.full(len(part), label), chunk) for part, label in zip(described, labels, strict=True)]
        n = sum(len(piece) for piece, _ in pieces)
        if n == 0:
            warnings.warn(f"HHAR: no chunk of {chunk} steps of user {user} with {device} in {path}.", stacklevel=2)
            continue
        x.append(normalized(np.concatenate([piece for piece, _ in pieces]), normalize))
        y.append(np.concatenate([label for _, label in pieces]))
        client.append(np.full(n, user))
        group.append(np.full(n, chosen.index(model)))
    if not x:
        raise ValueError(
            f"Expected `chunk` to be at most {longest}, the time steps of the longest stretch of one activity in "
            f"{path}{', less 199 before the first statistics' if features == 'statistics' else ''}, but got {chunk}. "
            f"Pass a smaller one, or check that the files hold {', '.join(chosen)}."
        )
    return Arrays(np.concatenate(x), np.concatenate(y), np.concatenate(client), _CLASSES, group=np.concatenate(group))


def statistics(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Describe each step of a stretch by 32 features, from its past only (Bacciu et al. 2021, IV.B).

    Windows of 200 steps start every 100. Each step takes the statistics of the newest window that is complete at that
    step; the paper does not say which, and the window around the step would look into the future. The first 199 steps,
    which have no complete window yet, are dropped.

    Args:
        x: Accelerometer xyz and gyroscope xyz, shape ``(t, 6)``.

    Returns:
        The 6 signals, the magnitudes of both sensors, then mean, standard deviation, minimum and maximum of each of
        the 6, shape ``(max(t - 199, 0), 32)``.

    Example:
        >>> statistics(np.zeros((201, 6), np.float32)).shape, statistics(np.zeros((9, 6), np.float32)).shape
        ((2, 32), (0, 32))
    """
    if len(x) < _SLIDING:
        return np.empty((0, 32), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, _SLIDING, axis=0)[:: _SLIDING // 2]
    reduced = [reduce(windows, axis=2) for reduce in (np.mean, np.std, np.min, np.max)]
    newest = np.arange(len(x) - _SLIDING + 1) // (_SLIDING // 2)
    kept = x[_SLIDING - 1 :]
    magnitude = np.linalg.norm(kept.reshape(-1, 2, 3), axis=2)
    return np.concatenate([kept, magnitude, *(values[newest] for values in reduced)], axis=1).astype(np.float32)


def locate(root: str | Path | None = None) -> str:
    """Say which layout `load` would read, without reading it.

    Args:
        root: Folder below which to look, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The layout and its path, for people.

    Raises:
        FileNotFoundError: If no layout is found.

    Example:
        >>> locate("a/folder/that/is/missing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: Expected the HHAR data below `root` but found none in a/folder/that/is/missing. ...
    """
    layout, path = _find(data_root(root))
    return f"{layout} {path}"


def fetch(root: str | Path | None = None) -> Path:
    """Return the data that are there; they must be downloaded by hand, as no checksum of the archive is published.

    Args:
        root: Folder of the data sets, see `lightning_fcl.data.datasets.data_root`.

    Returns:
        The folder or file that `load` will read.

    Raises:
        FileNotFoundError: If nothing is there; the message says what to download and where to put it.

    Example:
        >>> fetch()  # doctest: +SKIP
        PosixPath('~/.cache/lightning-fcl/data/hhar/Activity recognition exp')
    """
    return _find(data_root(root))[1]


def _require_options(rate: float, devices: Sequence[str] | None, features: str, normalize: str) -> tuple[str, ...]:
    require_normalize(normalize)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate <= 1000:
        raise ValueError(f"Expected `rate` to be above 0 and at most 1000 Hz but got {rate!r}. Pass, for example, 100.")
    if features not in ("raw", "statistics"):
        raise ValueError(f"Expected `features` to be 'raw' or 'statistics' but got {features!r}. Choose one of these.")
    chosen = DEVICES if devices is None else devices
    if isinstance(chosen, str) or not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(_MODELS):
        raise ValueError(
            f"Expected `devices` to be different models among {', '.join(_MODELS)} but got {devices!r}. "
            "Pass a list such as ['nexus4', 'lgwatch']."
        )
    return tuple(chosen)


def _find(root: Path) -> tuple[_Layout, Path]:
    for folder in (root / "hhar" / _FOLDER, root / _FOLDER, root / "hhar", root):
        if any((folder / f"{kind}_{sensor}.csv").is_file() for kind in ("Phones", "Watch") for sensor in _SENSORS):
            return "CSV files", folder
    for base in (root / "hhar_phone", root):
        if (base / "windows.npz").is_file():
            return "phone windows", base / "windows.npz"
    place = root / "hhar" / _FOLDER
    raise FileNotFoundError(
        f"Expected the HHAR data below `root` but found none in {root}. Download the archive by hand from "
        f"{DESCRIPTION.url} and unpack it, and `{_FOLDER}.zip` in it, so that {place / 'Phones_accelerometer.csv'} is "
        f"there, or point LIGHTNING_FCL_DATA at the folder that holds `{_FOLDER}` or `hhar_phone`."
    )


def _load_windows(path: Path, chunk: int, devices: Sequence[str] | None, features: str, normalize: str) -> Arrays:
    holds = f"{path} holds windows of one phone's accelerometer that are scaled per user already"
    if devices is not None:
        raise ValueError(f"Expected `devices` to be None but got {devices!r}: {holds}. Use the publishers' CSV files.")
    if features != "raw" or normalize != "user":
        name, wanted, got = ("features", "raw", features) if features != "raw" else ("normalize", "user", normalize)
        raise ValueError(f"Expected `{name}` to be {wanted!r} but got {got!r}: {holds}. Use the publishers' CSV files.")
    if _WINDOW % chunk:
        raise ValueError(
            f"Expected `chunk` to divide {_WINDOW}, the time steps of a window in {path}, but got {chunk}. Pass, for "
            "example, 128."
        )
    wanted_arrays = {"X": ("f", ("n", 3, _WINDOW)), "y": ("iu", ("n",)), "user": ("iu", ("n",))}
    arrays = read_npz(path, wanted_arrays)
    user = arrays["user"]
    wrong = np.flatnonzero((user < 0) | (user >= len(_USERS)))
    if wrong.size:
        raise ValueError(
            f"Expected `user` of {path} to be between 0 and {len(_USERS) - 1} but got {user[wrong[0]]} in sample "
            f"{wrong[0]}. {_REMEDY}"
        )
    pieces = _WINDOW // chunk
    return Arrays(
        x=arrays["X"].transpose(0, 2, 1).astype(np.float32).reshape(-1, chunk, 3),
        y=np.repeat(arrays["y"].astype(np.int64), pieces),
        client=np.repeat(np.array(_USERS)[user], pieces),
        classes=_CLASSES,
    )


def _recordings(
    folder: Path, models: tuple[str, ...], rate: float
) -> Iterator[tuple[_Owner, list[NDArray[np.float32]], list[int]]]:
    """Stretches of one activity and their labels, for each device of each user."""
    kinds = dict.fromkeys(_MODELS[model] for model in models)
    acc, gyro = (
        {k: v for kind in kinds for k, v in _read(folder / f"{kind}_{s}.csv", models).items()} for s in _SENSORS
    )
    for owner in sorted(acc | gyro, key=lambda owner: (owner[0], models.index(owner[1]), owner[2])):
        sensors = acc.pop(owner, None), gyro.pop(owner, None)
        found = _together(sensors[0], sensors[1], rate) if sensors[0] and sensors[1] else []
        yield owner, [part for part, _ in found], [label for _, label in found]


def _read(path: Path, models: tuple[str, ...]) -> dict[_Owner, _Sensor]:
    import pandas as pd

    parts: dict[_Owner, list[_Sensor]] = {}
    try:
        # The files are too large to be held as text, and `null` is a name here.
        with pd.read_csv(path, usecols=list(_COLUMNS), dtype=_COLUMNS, na_filter=False, chunksize=1_000_000) as reader:
            for table in reader:
                _gather(table, models, parts)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {_REMEDY}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"Expected {path} to hold whole rows of {', '.join(_COLUMNS)} but got: {error}. {_REMEDY}"
        ) from error
    return {owner: _ordered(pieces) for owner, pieces in parts.items()}


def _gather(table: "pd.DataFrame", models: tuple[str, ...], parts: dict[_Owner, list[_Sensor]]) -> None:
    """Sort the labelled rows of some models by their owners."""
    # A category is looked up once, not once a row.
    known = {"null": -1, **{name: label for label, name in enumerate(_CLASSES)}}
    for column, names in (("gt", known), ("User", _USERS), ("Model", _MODELS)):
        unknown = sorted(set(table[column].cat.categories) - set(names))
        if unknown:
            raise ValueError(f"{unknown[0]!r} as `{column}`, which is none of {', '.join(names)}")
    kept = table[(table["gt"] != "null") & table["Model"].isin(models)]
    for owner, rows in kept.groupby(["User", "Model", "Device"], observed=True, sort=False):
        xyz = rows[["x", "y", "z"]].to_numpy(np.float32)
        if not np.isfinite(xyz).all():
            raise ValueError(f"{xyz[~np.isfinite(xyz).all(axis=1)][0]} as x, y, z of user {owner[0]} with {owner[2]}")
        label = rows["gt"].astype(str).map(known).to_numpy(np.int64)
        parts.setdefault(owner, []).append((rows["Creation_Time"].to_numpy(np.int64), xyz, label))


def _ordered(pieces: list[_Sensor]) -> _Sensor:
    """Join pieces in the order of time; of rows with the same time the first counts."""
    time, xyz, label = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    pieces.clear()
    time, first = np.unique(time, return_index=True)
    return time, xyz[first], label[first]


def _together(acc: _Sensor, gyro: _Sensor, rate: float) -> list[tuple[NDArray[np.float32], int]]:
    """Both sensors on one grid, and the label, for each stretch in which both have the same one."""
    found = []
    runs, others = _runs(acc), _runs(gyro)
    i = j = 0
    while i < len(runs) and j < len(others):
        (a, b), (c, d) = runs[i], others[j]
        start, stop = max(acc[0][a], gyro[0][c]), min(acc[0][b - 1], gyro[0][d - 1])
        if start <= stop and acc[2][a] == gyro[2][c]:
            # From 0, as nanoseconds since 1970 do not fit into a float.
            grid = np.arange(int(np.floor((stop - start) * rate / 1e9)) + 1) / rate
            columns = [
                np.interp(grid, (time[first:last] - start) / 1e9, xyz[first:last, axis])
                for (time, xyz, _), first, last in ((acc, a, b), (gyro, c, d))
                for axis in range(3)
            ]
            found.append((np.stack(columns, axis=1).astype(np.float32), int(acc[2][a])))
        if acc[0][b - 1] < gyro[0][d - 1]:
            i += 1
        else:
            j += 1
    return found


def _runs(sensor: _Sensor) -> list[tuple[int, int]]:
    """First index, and the one past the last, of each stretch of one label without a gap."""
    time, _, label = sensor
    breaks = np.flatnonzero((np.diff(time) > _GAP * 1e9) | (np.diff(label) != 0)) + 1
    return list(itertools.pairwise([0, *breaks.tolist(), len(time)]))
