"""Tests of the TinyImageNet loader: it reads the pixels of both layouts, normalizes them, and reports damaged files."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from raising import raises

from lightning_fcl.data.datasets import photographs
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError

REMEDY = "Delete this copy and run `lightning-fcl data download tinyimagenet`."
# Class ids in the order of wnids.txt, which is not sorted. Two classes have the name "crane", and one class has no
# name.
WNIDS = ("n03126707", "n01443537", "n02012849", "n99999999")
WORDS = (
    "n00001740\tentity\nn01443537\tgoldfish, Carassius auratus\nn02012849\tcrane\nn03126707\tcrane\nn03976657\tpole\n"
)
CLASSES = ("goldfish", "crane (n02012849)", "crane (n03126707)", "n99999999")
# Number of training images per class. Numbers up to 11 have a different order if they are sorted as text.
TRAIN = 12
VAL = ("n02012849", "n99999999", "n01443537", "n02012849")


def photograph(seed: int, mode: str = "RGB", size: int = 64) -> bytes:
    """Return a JPEG file, smooth except for one sharp edge."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(256, size=(5, 5, 3), dtype=np.uint8)
    pixels = np.array(Image.fromarray(coarse).resize((size, size), Image.Resampling.BILINEAR))
    pixels[size // 2 :, size // 4 : size // 2] //= 2
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def files() -> dict[str, bytes]:
    """Return the files of the original folder, including an unlabeled test image."""
    content = {
        f"train/{wnid}/images/{wnid}_{n}.JPEG": photograph(100 * c + n, "L" if n == 3 else "RGB")
        for c, wnid in enumerate(WNIDS)
        for n in range(TRAIN)
    }
    for wnid in WNIDS:
        content[f"train/{wnid}/{wnid}_boxes.txt"] = b"".join(b"%s_0.JPEG\t0\t10\t63\t58\n" % wnid.encode() for _ in "a")
    content |= {f"val/images/val_{n}.JPEG": photograph(1000 + n) for n in range(len(VAL))}
    annotations = [f"val_{n}.JPEG\t{wnid}\t0\t32\t44\t62\n" for n, wnid in enumerate(VAL)]
    texts = {"val/val_annotations.txt": "".join(annotations), "wnids.txt": "\n".join(WNIDS) + "\n", "words.txt": WORDS}
    return content | {name: text.encode() for name, text in texts.items()} | {"test/images/test_0.JPEG": photograph(9)}


FILES = files()
ORDER = [f"train/{wnid}/images/{wnid}_{n}.JPEG" for wnid in sorted(WNIDS) for n in range(TRAIN)]
ORDER += [f"val/images/val_{n}.JPEG" for n in range(len(VAL))]
PIXELS = np.stack([np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB")) for name in ORDER])


def npz(**changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "X_train": rng.integers(256, size=(6, 32, 32, 3), dtype=np.uint8),
        "y_train": np.array([0, 0, 1, 1, 2, 2], np.uint8),
        "X_val": rng.integers(256, size=(3, 32, 32, 3), dtype=np.uint8),
        "y_val": np.array([2, 0, 1], np.uint8),
        "wnids": np.array(["n01443537", "n02012849", "n03126707"]),
        "names": np.array(["goldfish, Carassius auratus", "crane", "crane"]),
    } | changes


PLACES = ["tinyimagenet/tiny-imagenet-200", "tiny-imagenet-200", "tinyimagenet", "."]


@pytest.mark.parametrize("place", PLACES)
def test_load_tinyimagenet_original_folder_is_read(tmp_path, place, put):
    folder = put(tmp_path / place, FILES)
    assert SOURCES["tinyimagenet"].find(tmp_path) == ("folder of images", folder)
    data = photographs.load_tinyimagenet(tmp_path, size=64, normalize="none")
    assert data.x.dtype == np.uint8 and data.samples().dtype == np.float32
    np.testing.assert_array_equal(data.x, PIXELS.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(data.samples(), PIXELS.transpose(0, 3, 1, 2) / 255, rtol=1e-6)
    assert data.classes == CLASSES
    assert data.y.tolist() == [c for c in range(4) for _ in range(TRAIN)] + [1, 3, 0, 1]
    assert data.official_test.tolist() == [False] * 4 * TRAIN + [True] * 4
    assert data.client_ids is None and data.group is None


@pytest.mark.parametrize("place", ["tinyimagenet32", "tinyimagenet", "."])
def test_load_tinyimagenet_npz_file_is_read(tmp_path, place, put):
    path = put(tmp_path / place / "100classes.npz", npz())
    assert SOURCES["tinyimagenet"].find(tmp_path) == ("npz file", path)
    data = photographs.load_tinyimagenet(tmp_path)
    arrays = np.load(path)
    np.testing.assert_array_equal(data.x, np.concatenate([arrays["X_train"], arrays["X_val"]]).transpose(0, 3, 1, 2))
    assert data.y.tolist() == [0, 0, 1, 1, 2, 2, 2, 0, 1] and data.official_test.tolist() == [False] * 6 + [True] * 3
    assert data.classes == CLASSES[:3]


@pytest.mark.parametrize("size", [32, 48, 80])
def test_load_tinyimagenet_resizing_is_antialiased(tmp_path, size, put):
    put(tmp_path, FILES)
    pixels = photographs.load_tinyimagenet(tmp_path, size=size).x
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(PIXELS.astype(np.float64)).permute(0, 3, 1, 2), (size, size), mode="bicubic", antialias=True
    ).clamp(0, 255)
    assert pixels.shape == (52, 3, size, size)
    # Pillow rounds to integers and clips after each direction of the filter.
    np.testing.assert_allclose(pixels, wanted.numpy(), atol=4)
    assert np.abs(pixels - wanted.numpy()).mean() < 0.5


def test_load_tinyimagenet_normalize_channel_uses_training_images(tmp_path, put):
    put(tmp_path, FILES)
    data = photographs.load_tinyimagenet(tmp_path, normalize="channel")
    training = data.x[~data.official_test].astype(np.float64)
    mean, std = training.mean(axis=(0, 2, 3), keepdims=True), training.std(axis=(0, 2, 3), keepdims=True)
    np.testing.assert_allclose(data.samples(), (data.x - mean) / std, atol=1e-5)


def test_load_tinyimagenet_normalize_imagenet_equals_torchvision(tmp_path, put):
    put(tmp_path, FILES)
    transforms = pytest.importorskip("torchvision.transforms.functional")
    data = photographs.load_tinyimagenet(tmp_path)
    wanted = transforms.normalize(
        torch.from_numpy(data.x).float() / 255, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]
    )
    np.testing.assert_allclose(data.samples(), wanted.numpy(), atol=1e-5)


def test_load_tinyimagenet_constant_channel_is_only_centered(tmp_path, put):
    put(tmp_path / "100classes.npz", npz(X_train=np.full((6, 32, 32, 3), 7, np.uint8)))
    data = photographs.load_tinyimagenet(tmp_path, normalize="channel")
    assert not data.samples(~data.official_test).any() and np.isfinite(data.samples()).all()


def test_load_tinyimagenet_missing_validation_image_raises(tmp_path, put):
    path = put(tmp_path, FILES) / "val/images/val_2.JPEG"
    path.unlink()
    with raises(MissingFileError, value=path):
        photographs.load_tinyimagenet(tmp_path)


@pytest.mark.parametrize("removed", [range(8, 12), range(12)])
def test_load_tinyimagenet_missing_training_images_raise(tmp_path, removed, put):
    folder = put(tmp_path, FILES) / "train" / "n02012849" / "images"
    for n in removed:
        (folder / f"n02012849_{n}.JPEG").unlink()
    with raises(InvalidValueError, value=folder):
        photographs.load_tinyimagenet(tmp_path)


@pytest.mark.parametrize("name", ["words.txt", "val/val_annotations.txt"])
def test_load_tinyimagenet_invalid_text_file_raises(tmp_path, name, put):
    path = put(tmp_path, FILES) / name
    for content, kind, message in (
        (b"\n \n", ValueError, f"Expected {path} to have at least one non-empty line, but got none. {REMEDY}"),
        (b"\xff\xfe\x00", ValueError, f"Expected {path} to be a text file but got: 'utf-8' codec"),
        (None, FileNotFoundError, f"Expected the file {path} but it is missing. {REMEDY}"),
    ):
        put(path, content) if content is not None else path.unlink()
        with pytest.raises(kind, match=re.escape(message)):
            photographs.load_tinyimagenet(tmp_path)


@pytest.mark.parametrize("line", ["val_1.JPEG\tn00000001\t0\t0\t1\t1", "../val_1.JPEG\tn01443537\t0", "val_1.JPEG"])
def test_load_tinyimagenet_invalid_annotations_raise(tmp_path, line, put):
    path = put(tmp_path, FILES) / "val" / "val_annotations.txt"
    put(path, f"val_0.JPEG\tn01443537\t0\t0\t1\t1\n{line}\n".encode())
    with raises(DamagedFileError, value=path):
        photographs.load_tinyimagenet(tmp_path)


SIZE = " to be a complete JPEG image of 64 x 64 but got: an image of 84 x 84 in Pillow's"
WIDE = np.zeros((3, 64, 64, 3), np.uint8)
DAMAGES = {
    "a training image": (ORDER[5], photograph(0, size=84), SIZE),
    "a validation image": (ORDER[-1], photograph(0, size=84), SIZE),
    "another shape": ("100classes.npz", npz(X_val=WIDE), "of shape (3, 32, 32, 3), but got uint8"),
    "fewer labels": ("100classes.npz", npz(y_train=np.zeros(5, np.uint8)), "(6,), but got uint8 of shape (5,)."),
    "a label too many": ("100classes.npz", npz(y_val=np.array([0, 3, 1])), "between 0 and 2, but got 3 in sample 7."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_tinyimagenet_damaged_file_raises_with_path(tmp_path, damage, put, damaged):
    name, content, message = DAMAGES[damage]
    if not name.endswith(".npz"):
        put(tmp_path, FILES)
    assert message in damaged("tinyimagenet", name, content)


def test_download_tinyimagenet_folder_is_read_before_npz_file(tmp_path, publish, put):
    publish("tinyimagenet", "small.zip", {f"tiny-imagenet-200/{name}": content for name, content in FILES.items()})
    root = tmp_path / "data"
    put(root / "tinyimagenet32" / "100classes.npz", npz())
    assert SOURCES["tinyimagenet"].download(root) == root / "tinyimagenet" / "tiny-imagenet-200"
    assert len(photographs.load_tinyimagenet(root).x) == 52


@pytest.mark.seconds
@pytest.mark.data
def test_load_tinyimagenet_real_data_has_known_statistics(real):
    data = photographs.load_tinyimagenet(real("tinyimagenet", "npz file"), normalize="channel")
    assert data.x.shape == (17000, 3, 32, 32) and len(set(data.classes)) == 100
    assert np.bincount(data.y[~data.official_test]).tolist() == [120] * 100
    assert np.bincount(data.y[data.official_test]).tolist() == [50] * 100
    # Close to the widely used statistics of all 100,000 training images at 64 x 64.
    np.testing.assert_allclose(data.mean.ravel() / 255, [0.480, 0.448, 0.398], atol=0.01)
    # Goldfish are orange: most red, then green, then blue.
    fish = data.x[data.y == data.classes.index("goldfish")].mean(axis=(0, 2, 3))
    assert fish[0] - fish[2] > 30 > (data.mean[0] - data.mean[2]).item() and fish[0] > fish[1] > fish[2]
