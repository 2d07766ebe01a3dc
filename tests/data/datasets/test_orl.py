"""Tests of the ORL loader: it returns the same faces from both layouts and reports damaged files."""

import numpy as np
import pytest
import torch

from lightning_fcl.data.datasets import faces
from lightning_fcl.data.datasets.readers import SOURCES

REMEDY = "Delete this copy and get the file again."
# Number of images of people 2 and 10. As text, "10" comes before "2".
NUMBERS = {2: 10, 10: 2}
PIXELS = np.random.default_rng(0).integers(256, size=(12, 112, 92), dtype=np.uint8)
PERSON = np.repeat(list(NUMBERS), list(NUMBERS.values()))


def pgm(image: np.ndarray) -> bytes:
    """Return an image as a PGM file in the publishers' format."""
    return b"P5\n%d %d\n255\n" % (image.shape[1], image.shape[0]) + image.tobytes()


NAMES = [f"s{person}/{n}.pgm" for person, count in NUMBERS.items() for n in range(1, count + 1)]
FILES = {name: pgm(image) for name, image in zip(NAMES, PIXELS, strict=True)}


def npz(**changes) -> dict[str, np.ndarray]:
    return {"X": PIXELS, "y": (PERSON - 1).astype(np.uint8)} | changes


FOLDERS = ["orl", "orl/orl_faces", "orl/att_faces", "orl_faces", "att_faces", "."]
LAYOUTS = {
    **{place: lambda put, root, place=place: ("folders of images", put(root / place, FILES)) for place in FOLDERS},
    "npz below orl": lambda put, root: ("npz file", put(root / "orl" / "faces.npz", npz())),
    "npz": lambda put, root: ("npz file", put(root / "faces.npz", npz())),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_orl_every_layout_reads_pixels(tmp_path, layout, put):
    assert LAYOUTS[layout](put, tmp_path) == SOURCES["orl"].find(tmp_path)
    data = faces.load_orl(tmp_path, size=None, normalize="none")
    np.testing.assert_allclose(data.x[:, 0], PIXELS / 255, rtol=1e-6)
    assert data.x.shape == (12, 1, 112, 92) and data.x.dtype == np.float32
    assert data.y.tolist() == [0] * 10 + [1] * 2
    assert data.classes == ("s2", "s10")
    assert data.client_ids is None and data.official_test is None


@pytest.mark.parametrize("normalize", ["none", "image"])
@pytest.mark.parametrize("size", [None, (64, 48), (20, 30)])
def test_load_orl_layouts_are_equal(tmp_path, size, normalize, put):
    put(tmp_path / "a" / "orl", FILES)
    put(tmp_path / "b" / "orl" / "faces.npz", npz())
    one, other = (faces.load_orl(tmp_path / part, size=size, normalize=normalize) for part in "ab")
    np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(one.y, other.y)
    assert one.classes == other.classes


# Expected central parts. The ratio 4:3 keeps all rows and 84 columns. The ratio 2:3 keeps all columns and 61 rows
# (61.33) from row 25 on.
PARTS = {(64, 48): (slice(0, 112), slice(4, 88)), (20, 30): (slice(25, 86), slice(0, 92))}


@pytest.mark.parametrize("size", PARTS)
def test_load_orl_central_part_is_resized_with_antialiasing(tmp_path, size, put):
    # Pixels far from 0 and 255, because Pillow clips between the two directions of its filter.
    pixels = 64 + PIXELS // 2
    put(tmp_path / "faces.npz", npz(X=pixels))
    data = faces.load_orl(tmp_path, size=size, normalize="none")
    part = torch.from_numpy(pixels[:, *PARTS[size]].astype(np.float64))[:, None]
    wanted = torch.nn.functional.interpolate(part, size, mode="bicubic", antialias=True, align_corners=False)
    # Pillow rounds to integers after each direction of the filter, and rounds the weights of the filter.
    np.testing.assert_allclose(data.x * 255, wanted.numpy(), atol=2)


@pytest.mark.parametrize(("size", "part"), [((112, 84), np.s_[:, :, 4:88]), ([92, 92], np.s_[:, 10:102])])
def test_load_orl_part_of_requested_size_is_not_resized(tmp_path, size, part, put):
    put(tmp_path / "faces.npz", npz())
    x = faces.load_orl(tmp_path, size=size, normalize="none").x
    np.testing.assert_allclose(x[:, 0], PIXELS[part] / 255, rtol=1e-6)


def test_load_orl_extreme_aspect_ratio_keeps_one_row(tmp_path, put):
    put(tmp_path / "faces.npz", npz())
    x = faces.load_orl(tmp_path, size=(1, 400), normalize="none").x
    assert x.shape == (12, 1, 1, 400)
    # Only row 55 is kept, and its 92 pixels are resized to 400 pixels.
    np.testing.assert_allclose(x[:, 0, 0, 0] * 255, PIXELS[:, 55, 0], atol=30)


def test_load_orl_normalize_image_is_z_score_per_image(tmp_path, put):
    pixels = PIXELS.copy()
    pixels[7] = 33
    put(tmp_path / "faces.npz", npz(X=pixels))
    scaled = faces.load_orl(tmp_path, size=None).x[:, 0]
    mean = pixels.mean(axis=(1, 2), keepdims=True)
    deviation = pixels.std(axis=(1, 2), keepdims=True)
    deviation[7] = 1
    np.testing.assert_allclose(scaled, (pixels - mean) / deviation, atol=1e-5)
    assert not scaled[7].any()


def test_load_orl_other_files_are_skipped(tmp_path, put):
    folder = put(tmp_path / "orl", FILES)
    (folder / "s3").mkdir()
    put(folder / "README", b"The files are in PGM format")
    put(folder / "s2" / "._1.pgm", b"left by a file manager")
    put(folder / "spare" / "1.pgm", pgm(PIXELS[0]))
    data = faces.load_orl(tmp_path)
    assert len(data.x) == 12 and data.classes == ("s2", "s10")


def test_orl_source_prefers_original_images(tmp_path, put):
    put(tmp_path / "orl" / "faces.npz", npz())
    for place in reversed(["orl/orl_faces", "orl/att_faces", "orl_faces", "att_faces", "orl"]):
        folder = put(tmp_path / place, FILES)
        assert SOURCES["orl"].find(tmp_path) == ("folders of images", folder)


DAMAGES = {
    "another size": ("orl/s2/3.pgm", pgm(PIXELS[0].T), "but got: an image of 92 x 112 in Pillow's mode 'L'."),
    "16 bits": (
        "orl/s2/3.pgm",
        b"P5\n92 112\n65535\n" + bytes(2 * 92 * 112),
        "an image of 112 x 92 in Pillow's mode 'I",
    ),
    "another shape": ("faces.npz", npz(X=PIXELS[:, :64, :48]), "(12, 112, 92), but got uint8 of shape (12, 64, 48)."),
    "a person 41": ("faces.npz", npz(y=PERSON + 30), "to be between 0 and 39, but got 40 in sample 10."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_orl_damaged_file_raises_with_path(tmp_path, damage, put, damaged):
    name, content, message = DAMAGES[damage]
    if name != "faces.npz":
        put(tmp_path / "orl", FILES)
    said = damaged("orl", name, content)
    assert message in said and REMEDY in said


@pytest.mark.data
def test_load_orl_real_data_has_known_counts(real):
    data = faces.load_orl(real("orl"))
    assert data.x.shape == (400, 1, 64, 48)
    assert np.bincount(data.y).tolist() == [10] * 40
    assert data.classes == tuple(f"s{person}" for person in range(1, 41))
    np.testing.assert_allclose(data.x.std(axis=(1, 2, 3), dtype=np.float64), 1, atol=1e-5)
    assert faces.load_orl(real("orl"), size=None).x.shape == (400, 1, 112, 92)
    # With five example images per person, the nearest neighbor recognizes nearly all other images.
    flat, odd = data.x.reshape(400, -1), np.arange(400) % 2 == 1
    distance = (flat[odd] ** 2).sum(1)[:, None] + (flat[~odd] ** 2).sum(1) - 2 * flat[odd] @ flat[~odd].T
    assert (data.y[~odd][distance.argmin(1)] == data.y[odd]).mean() > 0.85
