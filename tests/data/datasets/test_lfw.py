"""Tests of the LFW loader: it crops and scales faces as documented, reads both layouts, and reports damaged files."""

import io

import numpy as np
import pytest
from PIL import Image
from raising import raises

from lightning_fcl.data.datasets.faces import load_lfw
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.errors import InvalidValueError

NPZ = "min35_gray_64x48.npz"
# Names that are not in alphabetical order, and their numbers of images. One person has no family name.
PEOPLE = {"Zoe_Ray": 3, "Abdullah": 1, "Bob_de_la_Cruz": 2}
REMEDY = "Delete this copy and get the file again."


def photograph(seed: int) -> bytes:
    """Return a JPEG file of 250 x 250 pixels in color, smooth except for one sharp edge."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(256, size=(9, 9, 3), dtype=np.uint8)
    pixels = np.array(Image.fromarray(coarse).resize((250, 250), Image.Resampling.BILINEAR))
    pixels[120:, 110:140] //= 2
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def files() -> dict[str, bytes]:
    """Return JPEG files by their paths in the original folder. The people are in alphabetical order."""
    names = [f"{name}/{name}_{n:04d}.jpg" for name in sorted(PEOPLE) for n in range(1, PEOPLE[name] + 1)]
    return {name: photograph(seed) for seed, name in enumerate(names)}


FILES = files()


def faces() -> np.ndarray:
    """Return rows 70 to 194 and columns 78 to 171 of the images as ITU-R 601-2 luma."""
    colours = np.stack([np.asarray(Image.open(io.BytesIO(content))) for content in FILES.values()]).astype(np.float64)
    assert colours.shape == (6, 250, 250, 3)
    return (colours @ [0.299, 0.587, 0.114])[:, 70:195, 78:172]


def npz(**changes) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file, with three people who have 36, 35 and 40 images."""
    return {
        "X": np.random.default_rng(0).integers(256, size=(111, 64, 48), dtype=np.uint8),
        "y": np.repeat(np.arange(3, dtype=np.uint8), [36, 35, 40]),
        "names": np.array(["Ann_Lee", "Bob_Ray", "Cy_Orr"]),
    } | changes


@pytest.mark.parametrize("place", ["lfw", "lfw/lfw", "lfw/lfw_funneled", "lfw_funneled", "."])
def test_load_lfw_original_folders_are_cropped_and_gray(tmp_path, place, put):
    folder = put(tmp_path / place, FILES)
    assert SOURCES["lfw"].find(tmp_path) == ("folders of images", folder)
    data = load_lfw(tmp_path, min_faces=1, size=(125, 94), normalize="none")
    assert data.x.shape == (6, 1, 125, 94)
    # Pillow rounds the luma to integers.
    np.testing.assert_allclose(data.x[:, 0] * 255, faces(), atol=0.51)
    assert data.y.tolist() == [0, 1, 1, 2, 2, 2]
    assert data.classes == ("Abdullah", "Bob_de_la_Cruz", "Zoe_Ray")
    assert data.client_ids is None and data.official_test is None


@pytest.mark.parametrize(("min_faces", "classes"), [(2, ("Bob_de_la_Cruz", "Zoe_Ray")), (3, ("Zoe_Ray",))])
def test_load_lfw_min_faces_excludes_people_with_fewer_images(tmp_path, min_faces, classes, put):
    put(tmp_path / "lfw", FILES)
    everybody = load_lfw(tmp_path, min_faces=1)
    data = load_lfw(tmp_path, min_faces=min_faces)
    kept = np.isin(np.array(everybody.classes)[everybody.y], classes)
    np.testing.assert_array_equal(data.x, everybody.x[kept])
    assert data.classes == classes
    assert [data.classes[label] for label in data.y] == [everybody.classes[label] for label in everybody.y[kept]]


def test_load_lfw_other_files_are_skipped(tmp_path, put):
    folder = put(tmp_path / "lfw", FILES)
    (folder / "Nobody").mkdir()
    put(folder / "pairs.txt", b"10 300")
    put(folder / "Zoe_Ray" / "._Zoe_Ray_0001.jpg", b"left by a file manager")
    put(folder / "Zoe_Ray" / "Thumbs.db", b"left by a file manager")
    data = load_lfw(tmp_path, min_faces=1)
    assert len(data.x) == 6 and "Nobody" not in data.classes


@pytest.mark.parametrize("place", ["lfw", "."])
def test_load_lfw_npz_file_reads_pixels_and_labels(tmp_path, place, put):
    path = put(tmp_path / place / NPZ, npz())
    assert SOURCES["lfw"].find(tmp_path) == ("npz file", path)
    data = load_lfw(tmp_path, normalize="none")
    with np.load(path) as archive:
        np.testing.assert_allclose(data.x[:, 0], archive["X"] / 255, rtol=1e-6)
        np.testing.assert_array_equal(data.y, archive["y"])
    assert data.classes == ("Ann_Lee", "Bob_Ray", "Cy_Orr")
    assert load_lfw(tmp_path, size=(32, 24)).x.shape == (111, 1, 32, 24)


def test_load_lfw_npz_file_people_are_filtered_and_sorted(tmp_path, put):
    path = put(tmp_path / NPZ, npz(names=np.array(["Cy_Orr", "Bob_Ray", "Ann_Lee"])))
    data = load_lfw(tmp_path, min_faces=36, normalize="none")
    with np.load(path) as archive:
        kept = np.flatnonzero(archive["y"] != 1)
        np.testing.assert_allclose(data.x[:, 0], archive["X"][kept] / 255, rtol=1e-6)
    assert data.classes == ("Ann_Lee", "Cy_Orr")
    assert data.y.tolist() == [1] * 36 + [0] * 40


@pytest.mark.parametrize("normalize", ["none", "image"])
def test_load_lfw_layouts_with_same_pixels_are_equal(tmp_path, normalize, put):
    content = {f"Ann_Lee/Ann_Lee_{n:04d}.jpg": photograph(n) for n in range(1, 36)}
    put(tmp_path / "a" / "lfw", content)
    pixels = load_lfw(tmp_path / "a", normalize="none").x[:, 0] * 255
    arrays = {"X": np.rint(pixels).astype(np.uint8), "y": np.zeros(35, int), "names": np.array(["Ann_Lee"])}
    put(tmp_path / "b" / NPZ, arrays)
    one, other = (load_lfw(tmp_path / part, normalize=normalize) for part in "ab")
    np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(one.y, other.y)
    assert one.classes == other.classes


def test_lfw_source_prefers_original_images(tmp_path, put):
    put(tmp_path / "lfw" / NPZ, npz())
    for place in ("lfw_funneled", "lfw", "lfw/lfw_funneled", "lfw/lfw"):
        folder = put(tmp_path / place, FILES)
        assert SOURCES["lfw"].find(tmp_path) == ("folders of images", folder)


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


IMAGE = "lfw/Zoe_Ray/Zoe_Ray_0002.jpg"
WHOLE = FILES["Zoe_Ray/Zoe_Ray_0002.jpg"]
CMYK, NARROW = (encoded(Image.new(mode, size)) for mode, size in (("CMYK", (250, 250)), ("RGB", (200, 250))))
NONE = npz(X=np.zeros((0, 64, 48), np.uint8), y=np.zeros(0, int))
DAMAGES = {
    "text": (IMAGE, b"<html>404</html>", "but got: cannot identify image file"),
    "cut short": (IMAGE, WHOLE[: len(WHOLE) // 2], "but got: image file is truncated"),
    "a PNG": (IMAGE, encoded(Image.new("RGB", (250, 250)), "PNG"), "but got: cannot identify"),
    "another size": (IMAGE, NARROW, "but got: an image of 250 x 200 in Pillow's mode 'RGB'."),
    "printing colors": (IMAGE, CMYK, "but got: an image of 250 x 250 in Pillow's mode 'CMYK'."),
    "no names": (NPZ, npz(names=None), "to contain an array 'names', but it does not."),
    "another shape": (NPZ, npz(X=np.zeros((111, 62, 47), np.uint8)), "(111, 64, 48), but got uint8 of shape (111, 62"),
    "16 bits": (
        NPZ,
        npz(X=np.zeros((111, 64, 48), np.uint16)),
        "to contain at least one uint8 image, but got uint16 of shape (111, 64, 48).",
    ),
    "nothing": (NPZ, NONE, "uint8 image, but got uint8 of shape (0, 64, 48)."),
    "a label too many": (NPZ, npz(y=np.arange(111) // 35), "to be between 0 and 2, but got 3 in sample 105."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_lfw_damaged_file_raises_with_path(tmp_path, damage, put, damaged):
    name, content, message = DAMAGES[damage]
    if name == IMAGE:
        put(tmp_path / "lfw", FILES)
    said = damaged("lfw", name, content, **({"min_faces": 1} if name == IMAGE else {}))
    assert message in said and REMEDY in said


def test_load_lfw_excluded_people_are_not_read(tmp_path, put):
    put(tmp_path / "lfw", FILES | {"Abdullah/Abdullah_0001.jpg": b""})
    assert len(load_lfw(tmp_path, min_faces=2).x) == 5


def test_load_lfw_gray_jpeg_is_read(tmp_path, put):
    put(tmp_path / "lfw", FILES | {"Zoe_Ray/Zoe_Ray_0002.jpg": encoded(Image.new("L", (250, 250), 51))})
    x = load_lfw(tmp_path, min_faces=1, normalize="none").x
    np.testing.assert_allclose(x[4], 0.2, atol=1e-6)


def test_load_lfw_min_faces_too_small_raises(tmp_path, put):
    put(tmp_path / NPZ, npz())
    for number in (34, 0):
        with raises(InvalidValueError, "min_faces", value=number):
            load_lfw(tmp_path, min_faces=number)


def test_load_lfw_min_faces_too_large_raises(tmp_path, put):
    put(tmp_path / "a" / "lfw", FILES)
    put(tmp_path / "b" / NPZ, npz())
    for root, wanted in ((tmp_path / "a", 4), (tmp_path / "b", 41)):
        with raises(InvalidValueError, "min_faces", value=wanted):
            load_lfw(root, min_faces=wanted)


def test_lfw_url_and_digest_equal_scikit_learn():
    published = pytest.importorskip("sklearn.datasets._lfw").FUNNELED_ARCHIVE
    assert (published.url, published.checksum) == (SOURCES["lfw"].url, SOURCES["lfw"].digest)


def test_download_lfw_creates_loadable_folder(tmp_path, publish, put):
    publish("lfw", "small.tgz", {f"lfw_funneled/{name}": content for name, content in FILES.items()})
    root = tmp_path / "data"
    put(root / "lfw" / NPZ, npz())
    assert SOURCES["lfw"].download(root) == root / "lfw" / "lfw_funneled"
    assert load_lfw(root, min_faces=1).x.shape == (6, 1, 64, 48)


@pytest.mark.data
def test_load_lfw_real_data_has_known_counts(real):
    data = load_lfw(real("lfw"))
    assert data.x.shape == (2053, 1, 64, 48) and data.x.dtype == np.float32
    counts = dict(zip(data.classes, np.bincount(data.y).tolist(), strict=True))
    assert len(counts) == 24 and min(counts.values()) == 35
    assert counts["George_W_Bush"] == 530 and counts["Tony_Blair"] == 144 and counts["Colin_Powell"] == 236
    assert data.classes == tuple(sorted(data.classes))
    np.testing.assert_allclose(data.x.mean(axis=(1, 2, 3), dtype=np.float64), 0, atol=1e-5)
    np.testing.assert_allclose(data.x.std(axis=(1, 2, 3), dtype=np.float64), 1, atol=1e-5)
    # Eyes and mouth are darker than the cheeks below the eyes. The rows show that the mean face is upright.
    rows = data.x[:, 0, :, 8:40].mean(axis=(0, 2))
    assert rows[18:23].mean() < rows[28:33].mean() > rows[44:49].mean()
    famous = ("Colin_Powell", "Donald_Rumsfeld", "George_W_Bush", "Gerhard_Schroeder", "Tony_Blair")
    assert load_lfw(real("lfw"), min_faces=100).classes == famous
