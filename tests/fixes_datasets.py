"""Table of hints in the error messages of datasets, scenarios and samples."""

import lightning.pytorch as L
import numpy as np
import torch
from fixes import Items, Row, of_dict, of_pair, pairs, stream_of_arrays, stream_of_data
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import ConcatDataset, Subset

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import GLFC, LwF
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.data.datasets import verify
from lightning_fcl.data.datasets.faces import load_lfw
from lightning_fcl.data.datasets.hhar import load_hhar
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.data.datasets.sensors import load_wesad
from lightning_fcl.data.labels import IndexedTargets
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Delayed, FLwFScenario
from lightning_fcl.data.scenarios.papers import ODFCLScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, UnknownNameError
from lightning_fcl.models import MLP

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


def save(lab, name, **arrays):
    path = lab.folder / name
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def read_hhar(lab, **options):
    save(lab, "hhar_phone/windows.npz", X=normal(3, 3, 128), y=[5, 0, 2], user=[8, 0, 0])
    assert load_hhar(lab.folder, **options).x.shape == (3, 128, 3)


def read_wesad(lab, **options):
    windows = {"X": normal(3, 6, 320), "y": [1, 0, 3], "subject": [2, 2, 17], "start": [50.0, 10.0, 3.0]}
    save(lab, "windows_10s.npz", **windows)
    assert load_wesad(lab.folder, **options).x.shape == (30, 32, 6)


def read_lfw(lab, min_faces):
    faces = np.random.default_rng(0).integers(256, size=(76, 64, 48), dtype=np.uint8)
    owner = np.repeat(np.arange(2, dtype=np.uint8), [36, 40])
    save(lab, "lfw/min35_gray_64x48.npz", X=faces, y=owner, names=np.array(["Ann_Lee", "Bob_Ray"]))
    assert load_lfw(lab.folder, min_faces=min_faces).classes == ("Ann_Lee", "Bob_Ray")


def read_labels(lab, labels):
    read = iter(labels)
    data = IndexedTargets(Items(lambda index: (torch.ones(6), next(read))), {3: 0, 5: 1})
    assert [data[index][1] for index in range(2)] == [0, 1]


def plan_people(lab, **options):
    sizes = {
        "num_people": 6,
        "num_base_people": 2,
        "num_sessions": 2,
        "num_nodes": 2,
        "train_per_class": 7,
        "test_per_class": 3,
    }
    stream_of_arrays(
        lab, torch.randn(80, 6), torch.arange(80) % 8, scenario=ODFCLScenario(**{**sizes, **options}), partition=None
    )


def plan_flwf(lab, **options):
    sizes = {"num_rounds": 2, "samples_per_round": 8, "test_per_class": 2, "pretrain_per_class": 2}
    tasks = {"a": [[0], [1]], "b": [[0, 1, 2, 3]]}
    scenario = FLwFScenario(**{**sizes, **options}, tasks=tasks)
    stream_of_arrays(lab, torch.randn(80, 6), torch.arange(80) % 4, scenario=scenario, partition=None)


def plan_copies(lab, copies):
    data = pairs(80)
    scenario = FLwFScenario(2, 8, 2, 2, tasks={"a": [[0], [1]], "b": [[0, 1, 2, 3]]})
    stream = FederatedStream(ConcatDataset([data] * copies), scenario)
    stream.setup("fit")
    assert len(stream.plan.test) == 8


def plan_overlap(lab, first=0, **options):
    data = pairs(80)
    module = L.LightningDataModule.from_datasets(
        Subset(data, range(60)), test_dataset=Subset(data, range(first, 80)), batch_size=8
    )
    stream_of_data(lab, module, partition=IID(2), **options)


def plan_features(lab, make):
    stream = FederatedStream(Items(make), ClassIncremental(2), partition=IID(2), backbone=MLP([6, 5, 4]))
    stream.setup("fit")
    assert stream.get_samples(np.arange(2))[0].shape == (2, 5)


def fit_monitored(lab, monitor):
    checkpoints = ModelCheckpoint(lab.folder, monitor=monitor)
    lab.fit(lab.task(), lab.stream(), [checkpoints], trainer_args={"enable_checkpointing": True})


SERIES = [torch.ones(2, 9, 3), torch.ones(2, 7, 3)]

ROWS |= {
    "dataset name without a similar name": Row(
        lambda lab, name: verify(name),
        {"name": "qqqqqq"},
        {"name": "digits"},
        "Use one of these names.",
        UnknownNameError,
    ),
    "chest of WESAD in windows of the wrist": Row(
        read_wesad, {"device": "chest"}, {"device": "wrist"}, 'Download the pickles, or pass `device="wrist"`.'
    ),
    "chunk that does not divide a window": Row(
        read_wesad,
        {"chunk": 33},
        {"chunk": 32},
        "Pass a divisor, for example 32, or use a layout with whole recordings.",
    ),
    "statistics of windows of HHAR": Row(
        read_hhar, {"features": "statistics"}, None, "Remove `features`, or use the publishers' CSV files."
    ),
    "people with few images": Row(
        read_lfw,
        {"min_faces": 20},
        {"min_faces": 35},
        f"Pass 35 or more, or run {SOURCES['lfw'].command} for the original images.",
    ),
    "label that changes when it is read": Row(
        read_labels,
        {"labels": [3, 4]},
        {"labels": [3, 5]},
        "Return the same label in each read, as the second item of a pair or in a dict.",
    ),
    "odfcl with few samples per person": Row(
        plan_people,
        {"train_per_class": 8},
        {"train_per_class": 7},
        "Lower `num_people`, `train_per_class` or `test_per_class`.",
    ),
    "rounds of flwf with few samples": Row(
        plan_flwf,
        {"samples_per_round": 16},
        {"samples_per_round": 8},
        "Lower `num_rounds`, `samples_per_round` (16), `test_per_class` or `pretrain_per_class`.",
    ),
    "copies in a scenario that draws its test samples": Row(
        plan_copies, {"copies": 2}, {"copies": 1}, "Remove the copies from the data, because `"
    ),
    "test samples that are trained on": Row(
        plan_overlap,
        {},
        {"first": 60},
        "Remove the shared samples from one of the two sets, or pass `split=Split(test=0.2)`",
    ),
    "test samples that are trained on, with a split": Row(
        plan_overlap,
        {},
        {"split": Split(test=0.2)},
        "Remove the shared samples from one of the two sets, or pass `split=Split(test=0.2)`",
    ),
    "features of samples that are dicts": Row(
        plan_features,
        {"make": of_dict},
        {"make": of_pair},
        "Return pairs of a tensor and a label from the dataset.",
    ),
    "samples of other shapes to join": Row(
        lambda lab, parts: concat_nested(parts),
        {"parts": SERIES},
        {"parts": [SERIES[0], torch.nn.functional.pad(SERIES[1], (0, 0, 0, 2))]},
        "Pad the samples to one shape in `collate_fn`.",
    ),
    "monitor without a similar metric": Row(
        fit_monitored, {"monitor": "qqqqqq"}, {"monitor": "train/loss"}, "Use one of ", UnknownNameError
    ),
    "number of experiences that is None": Row(
        lambda lab, **options: ClassIncremental(**options),
        {"num_experiences": None},
        None,
        "Leave `num_experiences` out for the default, 5.",
        InvalidTypeError,
    ),
    "number below its range": Row(
        lambda lab, delay: Delayed(ClassIncremental(2), delay), {"delay": -1}, {"delay": 0}, "Use 0 or more."
    ),
    "number at an open bound of its range": Row(
        lambda lab, value: LwF(temperature=value), {"value": 0.0}, {"value": 1e-3}, "Use a number above 0."
    ),
    "number above its range": Row(
        lambda lab, value: GLFC(strength=value), {"value": 1.5}, {"value": 1.0}, "Use 1 or less."
    ),
}
