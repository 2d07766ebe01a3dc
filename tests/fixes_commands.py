"""Table of hints in error messages about commands, results, tables and files."""

import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fixes_files import Row, command, copy_again, search_among, stream_of, table_of, tune
from PIL import Image

from lightning_fcl.cli.main import _flush
from lightning_fcl.data.datasets import ArrayDataset, load_dataset
from lightning_fcl.data.datasets.photographs import load_miniimagenet
from lightning_fcl.data.datasets.readers import read_arrays
from lightning_fcl.data.tables import Table
from lightning_fcl.deployment.node_data import _read_npz, write_split
from lightning_fcl.errors import DamagedFileError, FileAccessError, MissingFileError, MissingValueError
from lightning_fcl.evaluation.paper_figures import draw_densities
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.io.checkpoint import get_run_checkpoint, read_checkpoint
from lightning_fcl.io.checksums import check_digest, sha256
from lightning_fcl.io.reading import read_bytes
from lightning_fcl.io.safe_yaml import MAX_SIZE, read_yaml
from lightning_fcl.zoo.model_entry import WEIGHTS

ROWS: dict[str, Row] = {}


# Rows about commands


def print_to(lab, file):
    """Print a line to a file, as a command does."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    with open(lab.folder / file, "w") as output, redirect_stdout(output):
        print("quickstart")
        _flush()  # Commands call this function when they end.


def tune_patiently(lab, **options):
    """Run a search that stops if its first two trials fail."""
    lab.env.setattr("lightning_fcl.cli.tune._PATIENCE", 2)
    tune(lab, **options)


def fit_reservoir(lab, callbacks):
    """Fit a reservoir on digits whose rows are the time steps, and draw the densities of its activations."""
    digits = load_dataset("digits")
    rows = ArrayDataset(digits.x[:100].reshape(100, 8, 8), digits.y[:100], None, digits.classes, None, None)
    lab.env.setattr("lightning_fcl.data.samples.load_dataset", lambda name, root: rows)
    (lab.folder / "reservoir.yaml").write_text(RESERVOIR.format(callbacks))
    shutil.rmtree(lab.folder / "out", ignore_errors=True)
    command(lab, "fit reservoir.yaml --out out")
    return draw_densities({"panel": {"line": ("row", [read_results(lab.folder / "out")])}}, "Title")


RESERVOIR = """
model:
  class_path: lightning_fcl.ReservoirClassifier
  init_args:
    reservoir:
      class_path: lightning_fcl.models.EchoStateNetwork
      init_args: {{in_features: 8, units: 5, seed: 0}}
    num_classes: 10
    readout: last
trainer:
  strategy: {{class_path: lightning_fcl.FederatedStrategy}}
  callbacks: [{}]
  enable_progress_bar: false
  enable_checkpointing: false
  logger: false
data:
  data: rows
  scenario: {{class_path: ClassIncremental, init_args: {{num_experiences: 1}}}}
  partition: {{class_path: IID, init_args: {{num_clients: 2}}}}
"""

ROWS |= {
    "output to a full disk": Row(
        print_to, {"file": "/dev/full"}, {"file": "names.txt"}, "Redirect the output to another file.", FileAccessError
    ),
    "trials that are not there": Row(
        search_among,
        {"file": "nothing.csv"},
        {"file": "right.csv"},
        "Pass another file with `--trials-from`.",
        MissingFileError,
    ),
    "first trials that all fail": Row(
        tune_patiently,
        {"sizes": [[62, 10], [63, 10]]},
        {"sizes": [[64, 8, 10]], "words": "--restart"},
        "Correct the cause, then run the command with `--restart`.",
    ),
    "figure of densities that were not measured": Row(
        fit_reservoir,
        {"callbacks": ""},
        {"callbacks": "{class_path: lightning_fcl.callbacks.ActivationDensity}"},
        "Add `ActivationDensity` to the callbacks of the row, and train until an experience ends.",
        MissingValueError,
        "densities",
    ),
}


# Rows about results


def table_deleted(lab, delete):
    """Read a table. If `delete` is true, the table is deleted first."""
    table_of(lab)
    if delete:
        (lab.folder / "table.json").unlink()
        return read_table(lab.folder / "table.json")
    return table_of(lab)


def newer(text):
    """Return the text of a table, with its format number increased by 1."""
    content = json.loads(text)
    return json.dumps(content | {"format": content["format"] + 1})


ROWS |= {
    "table of another format": Row(
        table_of,
        {"change": newer},
        {"change": None},
        "Write the table with `lightning-fcl reproduce`.",
        argument="format",
    ),
    "table that is not there": Row(
        table_deleted,
        {"delete": True},
        {"delete": False},
        "Write the table with `lightning-fcl reproduce`.",
        MissingFileError,
    ),
}


# Rows about tables


def parquet_of(lab, damage=None):
    """Write a parquet file with pandas and read the file. A function `damage` changes the file before the read."""
    pytest.importorskip("pyarrow")
    path = lab.folder / "t.parquet"
    pd.DataFrame({"a": [1.0, 2.0], "y": ["p", "q"]}).to_parquet(path)
    if damage is not None:
        damage(path)
    assert len(Table(path, "y", ["a"])) == 2


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def read_latin(lab, encoding):
    """Write a CSV file in the given encoding, and read the file."""
    (lab.folder / "latin.csv").write_bytes("a,y\n1,é\n".encode(encoding))
    assert len(Table(lab.folder / "latin.csv", "y", ["a"])) == 1


def read_saved(lab, save):
    """Read a CSV file. If `save` is true, the file is written first."""
    if save:
        pd.DataFrame({"a": [1.0], "y": ["é"]}).to_csv(lab.folder / "saved.csv", index=False, encoding="utf-8")
    assert len(Table(lab.folder / "saved.csv", "y", ["a"])) == 1


PARQUET = "Write the file with `pandas.DataFrame.to_parquet`."
CSV = "Save the file as CSV in UTF-8, and pass its path."

ROWS |= {
    "parquet file that is cut off": Row(parquet_of, {"damage": cut}, {"damage": None}, PARQUET, DamagedFileError),
    "parquet file that is not there": Row(
        parquet_of, {"damage": Path.unlink}, {"damage": None}, PARQUET, MissingFileError
    ),
    "CSV file of another encoding": Row(
        read_latin, {"encoding": "latin-1"}, {"encoding": "utf-8"}, CSV, DamagedFileError
    ),
    "CSV file that is not there": Row(read_saved, {"save": False}, {"save": True}, CSV, MissingFileError),
}


# Rows about checkpoints


def load_alone(lab, name):
    """Read the checkpoint `name` in a folder that has one damaged checkpoint.

    If `name` is empty, read a checkpoint of the copied run instead.
    """
    folder = lab.folder / "alone"
    folder.mkdir(exist_ok=True)
    (folder / "cut.ckpt").write_bytes(lab.checkpoint().read_bytes()[:1000])
    return read_checkpoint(torch.load, folder / name if name else lab.checkpoint())


def newest_of(lab, damage, train=False):
    """Return the newest checkpoint of a run.

    By default, `damage` damages a checkpoint of the copied run first. With `train`, the recipe is trained again, and
    the checkpoint is from the new run.
    """
    if train:
        command(lab, "fit --config run/config.yaml --out again")
        return get_run_checkpoint(lab.folder / "again")
    damage(lab.checkpoint())
    return get_run_checkpoint(lab.run())


TRAIN = "Train the recipe in another folder: lightning-fcl fit --config "

ROWS |= {
    "checkpoint beside no other that is not there": Row(
        load_alone, {"name": "nothing.ckpt"}, {"name": None}, "Use another checkpoint.", MissingFileError
    ),
    "checkpoint beside no other that is cut off": Row(
        load_alone, {"name": "cut.ckpt"}, {"name": None}, "Use another checkpoint.", DamagedFileError
    ),
    "run whose checkpoints are damaged": Row(newest_of, {"damage": cut}, {"train": True}, TRAIN, DamagedFileError),
    "run without checkpoints": Row(newest_of, {"damage": Path.unlink}, {"train": True}, TRAIN, MissingFileError),
}


# Rows about files


def limited_bytes(lab, limit):
    (lab.folder / "a.bin").write_bytes(bytes(2000))
    lab.env.setenv("LIGHTNING_FCL_MAX_BYTES", limit)
    assert len(read_bytes(lab.folder / "a.bin")) == 2000


def limited_arrays(lab, limit):
    np.savez_compressed(lab.folder / "a.npz", x=np.zeros(500, np.float32))
    lab.env.setenv("LIGHTNING_FCL_MAX_BYTES", limit)
    assert len(read_arrays(lab.folder / "a.npz", ["x"])["x"]) == 500


def read_comment(lab, size):
    (lab.folder / "long.yaml").write_text("a: 1\n#" + "x" * size)
    assert read_yaml(lab.folder / "long.yaml") == {"a": 1}


def weights_of(lab):
    """Check the digest of the weights of the copied model. The first call deletes the weights before the check."""
    path = lab.entry() / WEIGHTS
    if not hasattr(lab, "digest"):
        lab.digest = sha256(path)
        path.unlink()
    return check_digest(path, lab.digest)


def read_own(lab, way):
    """Read the data of a node from a file. `way` selects how the file is written."""
    path, x, y = lab.folder / "own.npz", np.zeros((4, 6)), np.arange(4)
    if way == "text":
        path.write_text("x,y")
    elif way == "objects":
        np.savez(path, x=x.astype(object), y=y)
    elif way == "split":
        path = write_split(stream_of(), lab.folder / "shares")[1]
    else:
        np.savez(path, x=x.astype(np.float32), y=y.astype(str))
    assert len(_read_npz(path, for_server=False).samples)


def images_of(lab, lists):
    """Read MiniImageNet from CSV lists of images."""
    folder = lab.folder / "miniimagenet"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    for number, name in enumerate(("train", "val", "test")):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "images" / f"n0153282{number}.jpg")
        if name in lists:
            (folder / f"{name}.csv").write_text(lists[name].format(number))
    assert load_miniimagenet(lab.folder, size=8).x.shape == (3, 3, 8, 8)


LIST = "filename,label\nn0153282{0}.jpg,n0153282{0}\n"
LISTS = dict.fromkeys(("train", "val", "test"), LIST)
MINI = "Delete this copy and get the files again."
SAVE = "Write the file with `numpy.savez(path, x=x.astype(numpy.float32), y=labels.astype(str))`"

ROWS |= {
    "file above the limit of bytes": Row(
        limited_bytes, {"limit": "1000"}, {"limit": "2000"}, "set LIGHTNING_FCL_MAX_BYTES to at least 2000."
    ),
    "arrays above the limit of bytes": Row(
        limited_arrays,
        {"limit": "1000"},
        {"limit": "100000"},
        "set LIGHTNING_FCL_MAX_BYTES to at least",
        DamagedFileError,
    ),
    "YAML file that is too long": Row(read_comment, {"size": MAX_SIZE}, {"size": MAX_SIZE - 7}, "Use a smaller file."),
    "weights that are not there": Row(weights_of, {}, copy_again, "Get the file again.", MissingFileError),
    "text in place of an npz file": Row(read_own, {"way": "text"}, {"way": "numbers"}, SAVE, DamagedFileError),
    "npz file of objects": Row(
        read_own, {"way": "objects"}, {"way": "split"}, "or with `lightning-fcl deploy split`.", DamagedFileError
    ),
    "list of images without a heading": Row(
        images_of,
        {"lists": {**LISTS, "val": LIST.partition("\n")[2]}},
        {"lists": LISTS},
        MINI,
        DamagedFileError,
    ),
    "list of images that is not there": Row(
        images_of, {"lists": {"train": LIST, "test": LIST}}, {"lists": LISTS}, MINI, MissingFileError
    ),
}

SECONDS = {fit_reservoir, newest_of, tune_patiently}
"""Functions that take at least 0.5 s."""
