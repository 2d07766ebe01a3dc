"""Tests of the MiniImageNet loader: it reads each public layout and the npz file, and reports damaged files."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.data.datasets import images, photographs
from lightning_fcl.data.datasets.readers import SOURCES

REMEDY = "Delete this copy and get the files again."
# Classes of each list. The order is arbitrary.
PARTS = {"train": ("n02110341", "n01532829"), "val": ("n01855672",), "test": ("n02129165",)}
# Width and height of an image. The key is the image's number modulo 3.
SIZES = {0: (84, 84), 1: (50, 70), 2: (33, 20)}


def jpeg(seed: int, size: tuple[int, int] = (84, 84), mode: str = "RGB") -> bytes:
    coarse = np.random.default_rng(seed).integers(256, size=(5, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR).convert(mode)
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


LISTS = {part: [(f"{wnid}{n + 3:08d}.jpg", wnid) for wnid in wnids for n in range(3)] for part, wnids in PARTS.items()}
ROWS = [row for part in PARTS for row in LISTS[part]]
IMAGES = {name: jpeg(seed, SIZES[seed % 3], ("RGB", "L", "CMYK")[seed // 3 % 3]) for seed, (name, _) in enumerate(ROWS)}


FILES = {
    f"{part}.csv": ("filename,label\n" + "".join(f"{name},{wnid}\n" for name, wnid in rows)).encode()
    for part, rows in LISTS.items()
} | {f"images/{name}": content for name, content in IMAGES.items()}
WNIDS = sorted({wnid for _, wnid in ROWS})
# Names of the classes in `WNIDS`.
CLASSES = ("house finch", "goose", "dalmatian", "lion")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(folder))
    return folder


def pixels(names, size=32):
    """Return the images of `IMAGES` with these names, resized with Pillow, with channels first."""
    resized = (
        Image.open(io.BytesIO(IMAGES[name])).convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        for name in names
    )
    return np.stack([np.asarray(image) for image in resized]).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("place", ["miniimagenet", "mini-imagenet", "mini_imagenet", "miniImagenet", "."])
def test_load_miniimagenet_lists_and_images_are_read(tmp_path, place, put):
    folder = put(tmp_path / place, FILES)
    assert (
        SOURCES["miniimagenet"].find(tmp_path) == ("lists and images", folder)
        and SOURCES["miniimagenet"].download(tmp_path) == folder
    )
    data = photographs.load_miniimagenet(tmp_path, normalize="none")
    np.testing.assert_array_equal(data.x, pixels(name for name, _ in ROWS))
    assert data.classes == CLASSES
    assert [WNIDS[label] for label in data.y] == [wnid for _, wnid in ROWS]
    assert data.official_test is None and data.client_ids is None
    np.testing.assert_allclose(data.samples(), data.x / 255, rtol=1e-6)


def as_new_lists(put, root):
    """Write `new_train.csv`, and `new_val.csv` with the first image of each class. Return the rows of both lists."""
    parts = {"new_train.csv": [r for n, r in enumerate(ROWS) if n % 3], "new_val.csv": ROWS[::3]}
    lists = {
        name: ("filename,label\n" + "".join(f"{image},{wnid}\n" for image, wnid in rows)).encode()
        for name, rows in parts.items()
    }
    put(root / "miniimagenet", FILES | lists)
    return [*parts["new_train.csv"], *parts["new_val.csv"]]


def as_folders(put, root):
    put(root / "mini-imagenet", {f"{wnid}/{name}": IMAGES[name] for name, wnid in ROWS} | {"n01532829/notes.txt": b""})
    return sorted(ROWS)


def as_folders_of_parts(put, root):
    put(
        root / "miniimagenet",
        {f"{part}/{wnid}/{name}": IMAGES[name] for part, rows in LISTS.items() for name, wnid in rows},
    )
    return [row for part in sorted(LISTS) for row in sorted(LISTS[part])]


def npz(root, **other):
    """Write an npz file with lossless images, so that pixels can be compared, and return its arrays."""
    packed = []
    for name, _ in ROWS:
        Image.fromarray(pixels([name], 64)[0].transpose(1, 2, 0)).save(buffer := io.BytesIO(), "WEBP", lossless=True)
        packed.append(buffer.getvalue())
    arrays = {
        "webp": np.frombuffer(b"".join(packed), np.uint8),
        "offsets": np.cumsum([0, *map(len, packed)]),
        "y": np.array([WNIDS.index(wnid) for _, wnid in ROWS], np.uint8),
        "train": np.arange(len(ROWS)) % 3 > 0,
        "wnids": np.array(WNIDS),
        "files": np.array([name.removesuffix(".jpg") for name, _ in ROWS]),
    }
    (root / "miniimagenet64").mkdir(exist_ok=True)
    np.savez(root / "miniimagenet64" / "images.npz", **arrays | other)
    return arrays


@pytest.mark.parametrize("layout", [as_new_lists, as_folders, as_folders_of_parts])
def test_load_miniimagenet_other_layouts_are_read(tmp_path, layout, put):
    rows = layout(put, tmp_path)
    data = photographs.load_miniimagenet(tmp_path, size=20)
    np.testing.assert_array_equal(data.x, pixels((name for name, _ in rows), 20))
    assert data.classes == CLASSES and [WNIDS[label] for label in data.y] == [wnid for _, wnid in rows]
    official = [name in dict(ROWS[::3]) for name, _ in rows] if layout is as_new_lists else None
    assert (None if data.official_test is None else data.official_test.tolist()) == official


def test_load_miniimagenet_npz_file_is_read(tmp_path):
    npz(tmp_path)
    data = photographs.load_miniimagenet(tmp_path, size=64)
    np.testing.assert_array_equal(data.x, pixels((name for name, _ in ROWS), 64))
    assert data.classes == CLASSES and [WNIDS[label] for label in data.y] == [wnid for _, wnid in ROWS]
    assert data.official_test.tolist() == [n % 3 == 0 for n in range(len(ROWS))]


def test_load_miniimagenet_invalid_npz_file_raises(tmp_path, refused):
    offsets = npz(tmp_path)["offsets"]
    bounds = f"to cut the {offsets[-1]} bytes of `webp` into {len(ROWS)} images, but got"
    for wrong in (offsets[:-1], offsets + 1, offsets[[0, 2, 1, *range(3, len(offsets))]]):
        npz(tmp_path, offsets=wrong)
        assert bounds in refused(photographs.load_miniimagenet, tmp_path)
    npz(tmp_path, offsets=np.array([0, 9, *offsets[2:]]))
    assert f"images.npz/{ROWS[0][0].removesuffix('.jpg')}.webp to be a complete WEBP image" in refused(
        photographs.load_miniimagenet, tmp_path
    )
    npz(tmp_path, wnids=np.array(WNIDS[:-1]))
    assert "Expected `y` of " in refused(photographs.load_miniimagenet, tmp_path)


def test_load_miniimagenet_caches_resized_images(tmp_path, cache, put, monkeypatch):
    folder, read = put(tmp_path, FILES), []
    monkeypatch.setattr(
        images, "_resized", lambda image, size, plain=images._resized: read.append(0) or plain(image, size)
    )
    first = photographs.load_miniimagenet(tmp_path)
    assert len(read) == len(ROWS) and len([*cache.glob("images/*")]) == 1
    np.testing.assert_array_equal(photographs.load_miniimagenet(tmp_path, normalize="none").x, first.x)
    assert len(read) == len(ROWS)
    put(folder / "images" / ROWS[0][0], jpeg(99))
    assert not np.array_equal(photographs.load_miniimagenet(tmp_path).x[0], first.x[0])
    for broken in cache.glob("images/*"):
        broken.write_bytes(b"")
    np.testing.assert_array_equal(photographs.load_miniimagenet(tmp_path).x[1:], first.x[1:])


WRONG = {
    "no heading": ("n0153282900000003.jpg,n01532829\n", "to start with `filename,label`, with lines like"),
    "no images": ("filename,label\n", "but got: 'filename,label' and 0 more lines."),
    "a way out": ("filename,label\n../a.jpg,n01532829\n", "but got: '../a.jpg,n01532829'."),
    "no class": ("filename,label\na.jpg\n", "but got: 'a.jpg,'."),
    "a name for a class": ("filename,label\na.jpg,dog\n", "`n0153282900000005.jpg,n01532829`, but got: 'a.jpg,dog'."),
}


@pytest.mark.parametrize("case", WRONG)
def test_load_miniimagenet_invalid_list_raises_with_path(tmp_path, case, put, refused):
    content, message = WRONG[case]
    path = put(put(tmp_path, FILES) / "val.csv", content.encode())
    said = refused(photographs.load_miniimagenet, tmp_path)
    assert message in said and str(path) in said and REMEDY in said


@pytest.mark.parametrize("content", [jpeg(0)[:400], None])
def test_load_miniimagenet_damaged_or_missing_image_raises(tmp_path, content, put, refused):
    path = put(tmp_path, FILES) / "images" / ROWS[-1][0]
    put(path, content) if content is not None else path.unlink()
    said = refused(photographs.load_miniimagenet, tmp_path, error=FileNotFoundError if content is None else ValueError)
    assert f"Expected the file {path} but" in said or f"Expected {path} to be a complete JPEG image but got: " in said


def test_listed_reads_lists_of_ravi_and_larochelle(tmp_path):
    """The CSV lists in the package of Avalanche are read."""
    package = pytest.importorskip("avalanche.benchmarks.datasets.mini_imagenet.mini_imagenet")
    folder = Path(package.__file__).parent / "csv_files"
    rows = {part: photographs._listed(folder / f"{part}.csv") for part in PARTS}
    assert {part: len(own) for part, own in rows.items()} == {"train": 38400, "val": 9600, "test": 12000}
    classes = {part: {wnid for _, wnid in own} for part, own in rows.items()}
    assert {part: len(own) for part, own in classes.items()} == {"train": 64, "val": 16, "test": 20}
    assert len(set().union(*classes.values())) == 100
