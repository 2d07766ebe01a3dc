"""The MiniImageNet loader reads Ravi and Larochelle's lists, and names what is wrong with a copy."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.data.datasets import miniimagenet

REMEDY = "Delete this copy and get the files again."
# Classes of each list, not in order.
PARTS = {"train": ("n02110341", "n01532829"), "val": ("n01855672",), "test": ("n02129165",)}
NAMES = {"train": "train", "val": "validation", "test": "test"}
SIZES = {0: (84, 84), 1: (50, 70), 2: (33, 20)}  # width and height


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


@pytest.mark.parametrize("place", ["miniimagenet", "mini-imagenet", "mini_imagenet", "miniImagenet", "."])
def test_the_lists_and_images(tmp_path, place, put):
    folder = put(tmp_path / place, FILES)
    assert (
        miniimagenet.SOURCE.find(tmp_path) == ("lists and images", folder)
        and miniimagenet.SOURCE.fetch(tmp_path) == folder
    )
    data = miniimagenet.load(tmp_path, normalize="none")
    wanted = [Image.open(io.BytesIO(IMAGES[name])).convert("RGB").resize((32, 32), Image.Resampling.BICUBIC)
              for name, _ in ROWS]  # fmt: skip
    np.testing.assert_array_equal(data.x, np.stack([np.asarray(image) for image in wanted]).transpose(0, 3, 1, 2))
    assert data.classes == ("n01532829", "n01855672", "n02110341", "n02129165")
    assert [data.classes[label] for label in data.y] == [wnid for _, wnid in ROWS]
    assert data.official_test is None and data.client is None
    np.testing.assert_allclose(data.samples(), data.x / 255, rtol=1e-6)


@pytest.mark.parametrize("part", PARTS)
def test_a_part(tmp_path, part, put):
    put(tmp_path, FILES)
    whole, data = miniimagenet.load(tmp_path, size=20), miniimagenet.load(tmp_path, size=20, part=NAMES[part])
    assert data.classes == tuple(sorted(PARTS[part]))
    kept = np.isin(whole.y, [whole.classes.index(wnid) for wnid in PARTS[part]])
    np.testing.assert_array_equal(data.x, whole.x[kept])


def test_a_part_needs_no_other_list(tmp_path, put):
    folder = put(tmp_path, FILES)
    (folder / "val.csv").unlink()
    assert len(miniimagenet.load(tmp_path, part="train").x) == 6
    message = f"Expected the file {folder / 'val.csv'} but it is missing. {REMEDY}"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        miniimagenet.load(tmp_path)


def test_normalize_channel_is_the_z_score_of_all_images(tmp_path, put):
    put(tmp_path, FILES)
    samples = miniimagenet.load(tmp_path, normalize="channel").samples()
    np.testing.assert_allclose(samples.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(samples.std(axis=(0, 2, 3)), 1, atol=1e-5)


WRONG = {
    "no heading": ("n0153282900000003.jpg,n01532829\n", "to begin with the line `filename,label` and to name images"),
    "no images": ("filename,label\n", "to begin with the line `filename,label` and to name images but got"),
    "a way out": ("filename,label\n../a.jpg,n01532829\n", "but got '../a.jpg,n01532829'"),
    "no class": ("filename,label\na.jpg\n", "Expected line 2 of "),
    "a name for a class": ("filename,label\na.jpg,dog\n", "`n0153282900000005.jpg,n01532829`, but got 'a.jpg,dog'."),
    "nothing": ("", "to have lines but it is empty."),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_named(tmp_path, case, put, refused):
    content, message = WRONG[case]
    path = put(put(tmp_path, FILES) / "val.csv", content.encode())
    said = refused(miniimagenet.load, tmp_path)
    assert message in said and str(path) in said and REMEDY in said


@pytest.mark.parametrize("content", [b"", b"<html>", jpeg(0)[:400], None])
def test_damaged_and_missing_images_are_named(tmp_path, content, put, refused):
    path = put(tmp_path, FILES) / "images" / ROWS[-1][0]
    put(path, content) if content is not None else path.unlink()
    said = refused(miniimagenet.load, tmp_path, error=FileNotFoundError if content is None else ValueError)
    assert f"Expected the file {path} but" in said or f"Expected {path} to be a whole JPEG image but got: " in said


def test_the_lists_of_ravi_and_larochelle_are_read(tmp_path):
    """As Avalanche carries them."""
    package = pytest.importorskip("avalanche.benchmarks.datasets.mini_imagenet.mini_imagenet")
    folder = Path(package.__file__).parent / "csv_files"
    rows = {part: miniimagenet._listed(folder / f"{part}.csv") for part in PARTS}
    assert {part: len(own) for part, own in rows.items()} == {"train": 38400, "val": 9600, "test": 12000}
    classes = {part: {wnid for _, wnid in own} for part, own in rows.items()}
    assert {part: len(own) for part, own in classes.items()} == {"train": 64, "val": 16, "test": 20}
    assert len(set().union(*classes.values())) == 100
