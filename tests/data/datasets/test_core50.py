"""Tests of the CORe50 loader: it reads the pixels of the original folders and reports damaged files."""

import io

import numpy as np
import pytest
from PIL import Image
from raising import raises

from lightning_fcl.data.datasets import photographs
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.errors import MissingValueError

# Numbers of sessions and objects whose order differs if they are sorted as text. Each object has one to three frames.
SESSIONS, OBJECTS = (2, 3, 10, 11), (2, 10, 50)


def png(seed: int, side: int = 128, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def files(side: int = 128) -> dict[str, bytes]:
    """Return the PNG files of the frames by path, ordered by session, object and frame number."""
    names = [
        f"s{session}/o{thing}/C_{session:02d}_{thing:02d}_{frame:03d}.png"
        for session in SESSIONS
        for place, thing in enumerate(OBJECTS)
        for frame in range(7, 8 + place)
    ]
    return {name: png(seed, side) for seed, name in enumerate(names)}


FILES = files()
PIXELS = np.stack([np.asarray(Image.open(io.BytesIO(content))) for content in FILES.values()])
LABELS = [0, 1, 1, 2, 2, 2]
CLASSES = ("plug_adapter2", "mobile_phone5", "remote_control5")


@pytest.mark.parametrize("place", ["core50/core50_128x128", "core50_128x128"])
def test_load_core50_original_folder_reads_pixels_and_labels(tmp_path, place, put):
    folder = put(tmp_path / place, FILES)
    assert SOURCES["core50"].find(tmp_path) == ("folders of frames", folder)
    data = photographs.load_core50(tmp_path, size=128, normalize="none")
    np.testing.assert_array_equal(data.x, PIXELS.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(data.samples(), PIXELS.transpose(0, 3, 1, 2) / 255, rtol=1e-6)
    assert data.y.tolist() == LABELS * 4 and data.classes == CLASSES
    assert data.group.tolist() == np.repeat(SESSIONS, 6).tolist()
    assert data.official_test.tolist() == np.isin(data.group, [3, 7, 10]).tolist()
    assert data.client_ids is None


def test_load_core50_by_session_has_separate_classes_per_session(tmp_path, put):
    put(tmp_path / "core50_128x128", FILES)
    one, data = photographs.load_core50(tmp_path), photographs.load_core50(tmp_path, by_session=True)
    assert data.classes == tuple(f"s{session} {name}" for session in SESSIONS for name in CLASSES)
    assert [data.classes[label].split(" ")[1] for label in data.y] == [one.classes[label] for label in one.y]
    assert [data.classes[label].split(" ")[0] for label in data.y] == [f"s{session}" for session in data.group]
    assert data.official_test is None
    np.testing.assert_array_equal(data.x, one.x)


def test_load_core50_small_images_are_read_without_large_ones(tmp_path, put):
    small = put(tmp_path / "core50" / "core50_32x32", files(32))
    assert SOURCES["core50"].find(tmp_path) == ("folders of frames", small)
    assert photographs.load_core50(tmp_path).x.shape == (24, 3, 32, 32)
    large = put(tmp_path / "core50_128x128", FILES)
    assert SOURCES["core50"].find(tmp_path) == ("folders of frames", large)


def test_load_core50_normalize_channel_excludes_test_sessions(tmp_path, put):
    put(tmp_path / "core50_128x128", FILES)
    data = photographs.load_core50(tmp_path, normalize="channel")
    training = data.x[np.isin(data.group, [2, 11])]
    np.testing.assert_allclose(data.mean.ravel(), training.mean(axis=(0, 2, 3)), rtol=1e-6)
    whole = photographs.load_core50(tmp_path, normalize="channel", by_session=True)
    np.testing.assert_allclose(whole.mean.ravel(), data.x.mean(axis=(0, 2, 3)), rtol=1e-6)


def test_load_core50_other_files_are_skipped(tmp_path, put):
    folder = put(tmp_path / "core50_128x128", FILES)
    for name in ("s2/o2/C_02_10_007.png", "s2/o2/._C_02_02_007.png", "s2/o2/D_02_02_007.png", "s12/o1/C_12_01_000.png"):
        put(folder / name, b"no frame")
    assert len(photographs.load_core50(tmp_path).x) == 24


DAMAGES = {
    "another size": (png(0, 32), "but got: an image of 32 x 32 in"),
    "a palette": (png(0, mode="P"), "but got: an image of 128 x 128 in Pillow's mode 'P'."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_core50_damaged_image_raises_with_path(tmp_path, damage, put, refused):
    content, message = DAMAGES[damage]
    path = put(put(tmp_path / "core50_128x128", FILES) / "s10/o50/C_10_50_009.png", content)
    said = refused(photographs.load_core50, tmp_path)
    assert message in said and said.startswith(f"Expected {path} to be ")


def test_load_core50_missing_frames_raise_with_folder(tmp_path, put):
    folder = put(tmp_path / "a" / "core50_128x128", FILES)
    (folder / "s10/o10/C_10_10_007.png").unlink()
    # Videos can have different lengths, so a missing frame does not raise an error.
    assert len(photographs.load_core50(tmp_path / "a").x) == 23
    (folder / "s10/o10/C_10_10_008.png").unlink()
    empty = tmp_path / "b" / "core50_128x128" / "s1" / "o1"
    empty.mkdir(parents=True)
    for root, place in (("a", folder / "s10" / "o10"), ("b", empty)):
        with raises(MissingValueError, value=place):
            photographs.load_core50(tmp_path / root)


def test_core50_url_and_digest_equal_avalanche():
    published = pytest.importorskip("avalanche.benchmarks.datasets.core50.core50_data").data[0]
    name, url, digest = published
    assert (f"core50/{name}", url, f"md5:{digest}") == (
        SOURCES["core50"].archive,
        SOURCES["core50"].url,
        SOURCES["core50"].digest,
    )


def test_download_core50_creates_loadable_folder(tmp_path, publish):
    publish("core50", "small.zip", {f"core50_128x128/{name}": content for name, content in FILES.items()})
    assert SOURCES["core50"].download(tmp_path / "data") == tmp_path / "data" / "core50" / "core50_128x128"
    assert len(photographs.load_core50(tmp_path / "data").x) == 24


@pytest.mark.data
def test_load_core50_real_data_has_published_counts(real):
    data = photographs.load_core50(real("core50"))
    assert data.x.shape == (164866, 3, 32, 32) and len(data.classes) == 50
    assert np.unique(data.group).tolist() == list(range(1, 12))
    # Number of test frames that the publishers state.
    assert int(data.official_test.sum()) == 44972
