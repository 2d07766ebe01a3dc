"""Tests of a node in an environment with only the packages of `requirements-client.txt` and their dependencies."""

import re
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest
import torch
from packaging.requirements import Requirement

import lightning_fcl
from lightning_fcl.deployment.messages import read_header, to_arrays, to_record
from lightning_fcl.deployment.node import Node

from .recipes import method

FOLDER = Path(lightning_fcl.__file__).parents[1]
NAMED = [line for line in (FOLDER / "requirements-client.txt").read_text().splitlines() if line[:1].isalpha()]

ANSWERS = """
import sys
sys.path += [INSTALLED, PACKAGE]
import warnings
warnings.filterwarnings("ignore")
from pathlib import Path
from zlib import crc32
from lightning_fcl.deployment.flower import client_app
from lightning_fcl.deployment.messages import Parcel, to_arrays, read_header, to_record
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
import torch

# Flower sets these attributes in a process of a client.
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

app = client_app(Path(HERE))
config = {"client": "1", "data": DATA, "state-dir": HERE + "/device"}
for file in sorted(Path(HERE).glob("sent-*")):
    head, state = torch.load(file, weights_only=True)
    parcel = Parcel(head, state)
    message = Message(to_record(parcel), 7, "train" if parcel.state else "query")
    reply = app(message, Context(1, 7, config, RecordDict(), {}))
    head, arrays = read_header(reply.content), to_arrays(reply.content)
    sums = {name: crc32(array.data) for name, array in arrays.items()}
    print(head.get("refused", ""), sorted(head), sums)
print("loaded", sorted({name.partition(".")[0] for name in sys.modules} & (set(OTHERS) - {"lightning_fcl"})))
"""


@pytest.mark.slow
@pytest.mark.long
def test_node_runs_with_client_requirements_only(rehearsal, wire, install, tmp_path):
    """The uploads are identical to the uploads of a node in an environment with all packages."""
    one = rehearsal({"trainer": {"callbacks": [method("FLwF2T", beta=0.3), method("Replay", memory_size=20)]}})
    one.simulate()
    link = wire(one.nodes())
    one.serve(link, min_clients=3)
    sent = [parcel for number, parcel in link.asked if link.reached[number].client == "1"]
    for count, parcel in enumerate(sent):
        torch.save((dict(parcel.header), dict(parcel.state)), tmp_path / f"sent-{count}")
    installed = tmp_path / "installed"
    installed.mkdir()
    others = install(installed, [Requirement(line).name for line in NAMED])
    assert {"avalanche", "jsonargparse", "torchvision", "sklearn", "pandas"} <= set(others)
    known = {"INSTALLED": installed, "PACKAGE": FOLDER, "OTHERS": others, "HERE": tmp_path}
    known["DATA"] = one.folder / "data" / "1.npz"
    code = "".join(f"{name} = {value if isinstance(value, list) else str(value)!r}\n" for name, value in known.items())
    words = [sys.executable, "-I", "-S", "-c", code + ANSWERS]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    *answers, loaded = done.stdout.splitlines()
    assert loaded == "loaded []"
    again = Node(one.recipe, "1", str(one.folder / "data" / "1.npz"), tmp_path / "again")
    for answer, parcel in zip(answers, sent, strict=True):
        here = to_record(again.answer(parcel))
        assert re.sub(r"^ ", "", answer).startswith(str(sorted(read_header(here))))
        assert all(f"'{name}': {crc32(array.data)}" in answer for name, array in to_arrays(here).items())
