"""Tests of errors that all datasets have in common: invalid options, and folders that do not contain the dataset."""

import re

import pytest
from raising import raises

from lightning_fcl.data import datasets
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.errors import InvalidValueError

RUN = "Run `lightning-fcl data download {name}`, or"
HAND = "Download the archive by hand from"
NOTHING = {
    "cifar10": (
        "CIFAR-10",
        RUN,
        "`cifar-10-batches-py` with its files such as `data_batch_1`, folders of images as in "
        "`cifar10/train/airplane/0001.png`, or `cifar10/images.npz`",
    ),
    "cifar100": ("CIFAR-100", RUN, "`cifar-100-python` with its files `train`, `test` and `meta`"),
    "core50": ("CORe50", RUN, "`core50_128x128` or `core50_32x32`, as in `core50_128x128/s1/o1/C_01_01_000.png`"),
    "fc100": ("CIFAR-100", RUN, "`cifar-100-python` with its files `train`, `test` and `meta`"),
    "hhar": (
        "the HHAR data",
        f"{HAND} https://archive.ics.uci.edu/dataset/344/heterogeneity+activity+recognition, unpack it, and unpack "
        "`Activity recognition exp.zip` from it, so that "
        "{root}/hhar/Activity recognition exp/Phones_accelerometer.csv exists, or",
        "`Activity recognition exp` or `hhar_phone`",
    ),
    "lfw": (
        "the LFW data",
        RUN,
        "`lfw` or `lfw_funneled` with the people's folders, as in `lfw/Tony_Blair/Tony_Blair_0001.jpg`, or "
        "`lfw/min35_gray_64x48.npz`",
    ),
    "miniimagenet": (
        "MiniImageNet",
        "Get images and lists as described at https://github.com/yaoyao-liu/mini-imagenet-tools and copy them to "
        "{root}/miniimagenet, so that {root}/miniimagenet/train.csv, `val.csv`, `test.csv` and "
        "{root}/miniimagenet/images/n0153282900000005.jpg exist, or",
        "`miniimagenet` or `miniimagenet64/images.npz`",
    ),
    "orl": (
        "the ORL faces",
        f"{HAND} https://cam-orl.co.uk/facedatabase.html and unpack it to {{root}}/orl, so that {{root}}/orl/s1/1.pgm "
        "exists, or",
        "`orl`, `orl_faces` or `att_faces`",
    ),
    "tinyimagenet": ("TinyImageNet", RUN, "`tiny-imagenet-200` or `tinyimagenet32/100classes.npz`"),
    "ucihar": (
        "the UCI HAR data",
        RUN,
        "`UCI HAR Dataset`, `UCI HAR Dataset.zip`, `human+activity+recognition+using+smartphones.zip` or "
        "`ucihar/inertial.npz`",
    ),
    "wesad": (
        "the WESAD data",
        f"{HAND} https://archive.ics.uci.edu/dataset/465/wesad+wearable+stress+and+affect+detection and unpack it to "
        "{root}/wesad, so that {root}/wesad/WESAD/S2/S2.pkl exists, or",
        "`WESAD` or `wesad_wrist`",
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_missing_dataset_raises_with_instructions(tmp_path, name):
    title, advice, holds = NOTHING[name]
    (tmp_path / "miniimagenet" / "images").mkdir(parents=True)
    (tmp_path / "people" / "IMG").mkdir(parents=True)
    (tmp_path / "people" / "IMG_0001.jpg").touch()
    message = (
        f"Expected {title} below `root`, but found no such files in {tmp_path}. "
        f"{advice.format(name=name, root=tmp_path)} set LIGHTNING_FCL_DATA to the folder that contains {holds}."
    )
    source = SOURCES[name]
    calls = [datasets.load_dataset, datasets.verify, lambda _, root: source.find(root)]
    if not source.digest:
        calls.append(datasets.download)
    for call in calls:
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
            call(name, tmp_path)


OPTIONS = [
    *(("tinyimagenet", {"size": size}, "tinyimagenet.size") for size in (32.0, True)),
    *((name, {"size": 0}, "size") for name in ("cifar10", "cifar100", "core50", "fc100")),
    *((name, {"size": 0}, "size") for name in ("miniimagenet", "tinyimagenet")),
    *(("lfw", {"size": size}, "size") for size in ((64,), (64, 48, 1), (0, 48), (64, -1), (64.0, 48), (True, 48))),
    *(("lfw", {"size": size}, "lfw.size") for size in (None, [64, 48.0])),
    ("orl", {"size": (64, 0)}, "size"),
    *(
        (name, {"normalize": "all"}, f"{name}.normalize")
        for name in (
            *("cifar10", "cifar100", "core50", "fc100", "hhar"),
            *("lfw", "miniimagenet", "orl", "tinyimagenet", "wesad"),
        )
    ),
    ("wesad", {"device": "ankle"}, "wesad.device"),
    ("hhar", {"features": "mean"}, "hhar.features"),
    ("ucihar", {"standardize": "axis"}, "ucihar.standardize"),
]


@pytest.mark.parametrize(("name", "options", "argument"), OPTIONS)
def test_load_dataset_invalid_option_raises_before_file_search(tmp_path, name, options, argument):
    (value,) = options.values()
    with raises(InvalidValueError, argument, value=value):
        datasets.load_dataset(name, tmp_path, **options)
