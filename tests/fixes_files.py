"""Table of hints in error messages about files, commands, recipes and deployments."""

import hashlib
import json
import os
import shlex
import shutil
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import yaml
from fixes import Row
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_fcl import ClientSpeeds, Deadline, FederatedStream, Swarm, zoo
from lightning_fcl.cli.jobs import Job, run_parallel
from lightning_fcl.cli.main import main
from lightning_fcl.cli.reproduce import make_jobs, match_names, run_rows
from lightning_fcl.cli.search import Search, trial_recipe
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.labels import check_names as check_class_names
from lightning_fcl.data.labels import index_targets
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Online
from lightning_fcl.data.split import Split
from lightning_fcl.data.tables import Table
from lightning_fcl.deployment.deployment_server import check_deployable
from lightning_fcl.deployment.messages import RejectedMessageError, check_names, check_same, check_tensor
from lightning_fcl.deployment.node import client_state_folder
from lightning_fcl.deployment.node_data import read_data, set_server_data, split_file, write_split
from lightning_fcl.deployment.node_recipe import client_plan, make_outline, read_recipe
from lightning_fcl.deployment.upload_validation import Upload, UploadLimits, decode_upload, parse_file_name
from lightning_fcl.edge.export import export_int8_onnx, export_onnx
from lightning_fcl.edge.report import device_report
from lightning_fcl.errors import (
    ConnectionFailedError,
    DamagedFileError,
    DiskFullError,
    FileAccessError,
    FileConflictError,
    InvalidStateError,
    InvalidTypeError,
    MissingFileError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.evaluation import read_run
from lightning_fcl.evaluation.comparison import compare_page, find_runs
from lightning_fcl.evaluation.paper_figures import draw_tasks
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.summary import time_to
from lightning_fcl.evaluation.table import Table as Results
from lightning_fcl.evaluation.table import cells, read_table, write_table
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.synchronization import Participation
from lightning_fcl.io.atomic import run_lock, write_atomic
from lightning_fcl.io.checkpoint import get_run_checkpoint, read_checkpoint, require_checkpoint_file
from lightning_fcl.io.checksums import check_digest, read_checksums, sha256
from lightning_fcl.io.download import Layout, Source, download
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import LimitSettingError, read_bytes
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.runs.fit import FederatedCLI, make_cli, resolve_recipe
from lightning_fcl.runs.lightning_errors import convert_errors
from lightning_fcl.runs.loaded_recipe import load_recipe
from lightning_fcl.runs.paper_rows import find_recipe, recipes_folder
from lightning_fcl.runs.recipe import Recipe, take_settings
from lightning_fcl.runs.secret_values import with_variables
from lightning_fcl.zoo.continuation import continue_from, read_continuation
from lightning_fcl.zoo.loading import read_tensors
from lightning_fcl.zoo.model_entry import (
    CHECK,
    CHECKSUMS_FILE,
    CONFIG,
    CONTINUE,
    WEIGHTS,
    read_entry,
    read_files,
    write_entry_checksums,
)
from lightning_fcl.zoo.pretrained import read_samples
from lightning_fcl.zoo.publishing import publish
from lightning_fcl.zoo.registry import REGISTRY, copy_to_registry, register

NAME = "mlp.digits.flwf2t_replay"
LR = "model.init_args.optimizer.init_args.lr"
SMALL = "--trainer.enable_progress_bar=false --trainer.max_epochs=1 --data.partition.num_clients=2"


ROWS: dict[str, Row] = {}


def command(lab, words, prepare=None):
    """Run a command line in the folder of the test."""
    if prepare is not None:
        prepare(lab)
    try:
        main(shlex.split(words))
    except SystemExit as end:  # Options such as --help end the program.
        assert end.code == 0


def written(lab, name, content):
    path = lab.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# Rows about commands


def with_run(lab):
    lab.run()


def with_file(name):
    return lambda lab: written(lab, name, "x") if not (lab.folder / name).exists() else None


def read_record(lab, change):
    """Read a run that has only a record. ``change`` changes the lines of the record."""
    folder = lab.folder / "unfinished"
    folder.mkdir(exist_ok=True)
    lines = (lab.run() / "record.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "record.jsonl").write_bytes(b"".join(map(change, lines)))
    return read_run(folder)


def read_search(lab, **changes):
    objective = {"objective": "x", "direction": "maximize"}
    content = {"configs": ["quickstart.yaml"], **objective, "trials": 2, "space": {LR: [0.1, 0.2]}, **changes}
    for name, file in (("quickstart", "quickstart.yaml"), ("quickstart-private", "private.yaml")):
        shutil.copy(recipes_folder() / f"{name}.yaml", lab.folder / file)
    path = written(lab, "search.yaml", {name: value for name, value in content.items() if value is not None})
    search = Search.read(path, **({"case": "a"} if "variants" in content else {}))
    return list(search.grid()) if search.sampler == "grid" else search


def read_search_file(lab, text):
    shutil.copy(recipes_folder() / "quickstart.yaml", lab.folder / "quickstart.yaml")
    return Search.read(written(lab, "mine.yaml", text))


def search_among(lab, file):
    written(lab, "of-another.csv", "trial,y\n0,1\n")
    written(lab, "failed.csv", f"trial,x,{LR}\n0,,0.1\n")
    written(lab, "right.csv", f"trial,x,{LR}\n0,0.5,0.1\n")
    assert len(read_search(lab).load_trials(lab.folder / file).points) == 1


def tune(lab, sizes, words=""):
    """Search the layer sizes of a network. A trial with wrong layer sizes fails in training."""
    small = {"max_epochs": 1, "enable_progress_bar": False}
    partition = {"init_args": {"num_clients": 2}}
    written(lab, "tiny.yaml", {"trainer": small, "data": {"partition": partition, "split": {"validation": 0.3}}})
    read_search(
        lab,
        configs=["quickstart.yaml", "tiny.yaml"],
        objective="final_accuracy/server",
        trials=len(sizes),
        space={"model.init_args.model.init_args.sizes": sizes},
        sampler="grid",
    )
    command(lab, f"tune search.yaml --out out --workers 1 {words}")  # `words` may override `--out`


def changed_search(lab, units, words=""):
    """Run a search in the folder of an earlier search. `units` changes the search space."""
    if not (lab.folder / "out").exists():
        tune(lab, [[64, 8, 10]])
    tune(lab, [[64, units, 10]], words)


WORKER = """
import multiprocessing, os, signal

def work(job):
    if multiprocessing.parent_process() is not None and not job.out.exists():
        job.out.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job.label
"""


def run_twice(lab, workers):
    """Run two jobs. The first worker process that starts a job is killed."""
    written(lab, "killed_once.py", WORKER)
    lab.env.syspath_prepend(str(lab.folder))
    jobs = [Job(str(number), Recipe(), number, lab.folder / "killed") for number in range(2)]
    work = import_module("killed_once").work
    assert {label for _, label in run_parallel(work, jobs, workers)} == {"0", "1"}


def table_rows(lab, finished):
    folder = lab.folder / "toy"
    small = {
        "trainer": {"max_epochs": 1, "enable_progress_bar": False},
        "data": {"partition": {"init_args": {"num_clients": 2}}},
    }
    written(lab, "toy/base.yaml", (recipes_folder() / "quickstart.yaml").read_text())
    written(lab, "toy/small.yaml", small)
    written(lab, "toy/rows.yaml", {"base": "base.yaml", "rows": {"a": "small.yaml"}})
    jobs = make_jobs(folder, None, "paper", 1, None, lab.folder / "out")
    jobs = run_rows(jobs, folder, lab.folder / "out", 1, finished)
    assert [len(runs) for runs in jobs.values()] == [1]


def no_data(lab):
    lab.env.setenv("LIGHTNING_FCL_DATA", str(lab.folder / "empty"))


ROWS |= {
    "command without the recipe's data": Row(
        command,
        {"words": "edge-report flwf/flwf-2t", "prepare": no_data},
        {"words": "edge-report flwf/flwf-2t --input 6,128"},
        "Pass the shape with `--input`",
        MissingFileError,
    ),
    "sizes of --input": Row(
        command,
        {"words": "edge-report quickstart --input 1,8,x"},
        {"words": "edge-report quickstart --input 1,8,8"},
        "Write the sizes as in `--input 1,64,48`",
    ),
    "deploy into a folder of something else": Row(
        command,
        {"words": "deploy split quickstart --out mine", "prepare": with_file("mine/notes.txt")},
        {"words": "deploy split quickstart --out empty"},
        "Use an empty folder with `--out`",
    ),
    "empty value of --out": Row(
        command,
        {"words": "fit quickstart --out= --print_config"},
        {"words": "fit quickstart --out=there --print_config"},
        "Write --out=VALUE",
        MissingValueError,
        "--out",
    ),
    "empty value of --out, removed": Row(
        command,
        {"words": "fit quickstart --out= --print_config"},
        {"words": "fit quickstart --print_config"},
        "or remove the option",
        MissingValueError,
        "--out",
    ),
    "--out below a file": Row(
        command,
        {"words": f"fit quickstart {SMALL} --out file/run", "prepare": with_file("file")},
        {"words": f"fit quickstart {SMALL} --out other/run"},
        "Use another folder with `--out`",
    ),
    "several seeds of a run": Row(
        command,
        {"words": "fit run --seeds 1", "prepare": with_run},
        {"words": f"fit run/config.yaml {SMALL} --seeds 1 --workers 1 --out several"},
        "Use run/config.yaml. The command that started several runs also resumes these runs.",
        argument="RECIPE",
    ),
    "several seeds from a checkpoint": Row(
        command,
        {"words": f"fit quickstart {SMALL} --seeds 1 --workers 1 --out several --ckpt_path x.ckpt"},
        {"words": f"fit quickstart {SMALL} --seeds 1 --workers 1 --out several"},
        "Remove `--ckpt_path` or `--seeds`.",
        argument="--ckpt_path",
    ),
    "several seeds of a recipe with a checkpoint": Row(
        command,
        {
            "words": f"fit quickstart --config ckpt.yaml {SMALL} --seeds 1",
            "prepare": lambda lab: written(lab, "ckpt.yaml", {"ckpt_path": "x.ckpt"}),
        },
        {"words": f"fit quickstart {SMALL} --seeds 1 --workers 1 --out several"},
        "Remove `ckpt_path`.",
        argument="ckpt_path",
    ),
    "seeds that are no numbers": Row(
        command,
        {"words": "fit quickstart --seeds two"},
        {"words": f"fit quickstart {SMALL} --seeds 0, --workers 1 --out several"},
        "Use `--seeds 5` for the seeds 0 to 4, or `--seeds 3,7` for these seeds.",
        argument="--seeds",
    ),
    "sweep without values": Row(
        command,
        {"words": "fit quickstart --sweep data.batch_size"},
        {"words": f"fit quickstart {SMALL} --sweep data.batch_size=16,32 --workers 1 --out several"},
        "Write an option of the recipe and its values, as in `--sweep data.batch_size=16,32`.",
        argument="--sweep",
    ),
    "workers of one run": Row(
        command,
        {"words": f"fit quickstart {SMALL} --out one --workers 1"},
        {"words": f"fit quickstart {SMALL} --out several --workers 1 --seeds 1"},
        "Add `--seeds N`",
        MissingValueError,
        "--workers",
    ),
    "metrics of a report without a table": Row(
        command,
        {"words": "report run --metrics final_accuracy/server", "prepare": with_run},
        {"words": "report run --metrics final_accuracy/server --table markdown", "prepare": with_run},
        "Add `--table markdown`.",
        MissingValueError,
        "--table",
    ),
    "help on an unknown class": Row(
        command,
        {"words": "fit --help=FedVit"},
        {"words": "fit --help=FedViT"},
        "Did you mean FedViT?",
        UnknownNameError,
    ),
    "test of no run": Row(
        command,
        {"words": "test", "prepare": with_run},
        {"words": "test run"},
        "Pass only the folder of a run",
        MissingValueError,
    ),
    "cp over a file": Row(
        command,
        {"words": "cp quickstart mine.yaml", "prepare": with_file("mine.yaml")},
        {"words": "cp quickstart other.yaml"},
        "Use another file name",
    ),
    "cp over a file, with --force": Row(
        command,
        {"words": "cp quickstart mine.yaml", "prepare": with_file("mine.yaml")},
        {"words": "cp quickstart mine.yaml --force"},
        "or pass `--force`",
    ),
    "killed worker process": Row(
        run_twice, {"workers": 2}, {"workers": 1}, "use fewer workers with `--workers`", InvalidStateError
    ),
    "search without trials": Row(
        read_search, {"trials": None}, {"trials": 3}, "Set `trials`, or pass `--trials`", argument="trials"
    ),
    "search with an empty space": Row(
        read_search,
        {"space": {}},
        {"space": {"data.batch_size": [16, 32]}},
        "`space: {data.batch_size: [16, 32]}`",
        argument="space",
    ),
    "setting in the space and in a variant": Row(
        read_search,
        {"variants": {"a": {LR: 0.3}}},
        {"variants": {"a": {"data.batch_size": 8}}},
        f"Remove {LR} from one of them.",
    ),
    "search of the maximum norm of a private recipe": Row(
        read_search,
        {"space": {"trainer.strategy.init_args.privacy.init_args.clip": [0.1, 1.0]}},
        {"space": {LR: [0.1, 0.2]}},
        "Search with public data and without `privacy`",
        argument="privacy",
    ),
    "search with a private recipe": Row(
        read_search,
        {"configs": ["private.yaml"]},
        {"configs": ["quickstart.yaml"]},
        "without `privacy`, and use the best settings for the private fit.",
        argument="privacy",
    ),
    "objective of an unknown direction": Row(
        read_search,
        {"objective": "final_MSE/server", "direction": None},
        {"objective": "final_MSE/server", "direction": "minimize"},
        "Set `direction: maximize`, or `direction: minimize`.",
        argument="direction",
    ),
    "recipe instead of a search file": Row(
        read_search_file,
        {"text": "trainer: {max_epochs: 3}"},
        {"text": f"configs: [quickstart.yaml]\nobjective: forgetting/clients\ntrials: 1\nspace: {{{LR}: [0.1]}}"},
        "`configs: [mine.yaml]`, `objective` and `space`, as in `lightning-fcl tune --help`.",
    ),
    "search with a missing recipe": Row(
        read_search,
        {"configs": ["nothing.yaml"]},
        {"configs": ["quickstart.yaml"]},
        "relative to the folder of the search file",
        MissingValueError,
    ),
    "grid without steps": Row(
        read_search,
        {"sampler": "grid", "space": {LR: {"low": 0.0, "high": 1.0}}},
        {"space": {LR: {"low": 0.0, "high": 1.0, "step": 0.5}}},
        "Add a `step`",
    ),
    "grid without steps, drawn at random": Row(
        read_search,
        {"sampler": "grid", "space": {LR: {"low": 0.0, "high": 1.0}}},
        {"sampler": "random"},
        "or use `sampler: random`",
    ),
    "space with a number instead of a list": Row(
        read_search, {"space": {LR: 0.1}}, {"space": {LR: [16, 32]}}, "Write a list, as in [16, 32]"
    ),
    "space of equal choices": Row(read_search, {"space": {LR: [1, 1]}}, {"space": {LR: [1]}}, "List each choice once"),
    "space with low above high": Row(
        read_search,
        {"space": {LR: {"low": 2.0, "high": 1.0}}},
        {"space": {LR: {"low": 1.0, "high": 2.0}}},
        "Choose `low` below `high`",
    ),
    "trials of another search": Row(
        search_among, {"file": "of-another.csv"}, {"file": "right.csv"}, "with `--trials-from`", DamagedFileError
    ),
    "trials that have failed": Row(
        search_among, {"file": "failed.csv"}, {"file": "right.csv"}, "with `--trials-from`", MissingValueError
    ),
    "setting of an unknown callback": Row(
        lambda lab, key: trial_recipe({key: 5}, [{"class_path": "lightning_fcl.callbacks.Replay"}]),
        {"key": "trainer.callbacks.Repaly.memory_size"},
        {"key": "trainer.callbacks.Replay.memory_size"},
        "Did you mean Replay?",
        UnknownNameError,
    ),
    "trials that all fail": Row(
        tune,
        {"sizes": [[63, 10]]},
        {"sizes": [[64, 8, 10]], "words": "--restart"},
        "Correct the cause, then run the command with `--restart`",
    ),
    "search in the folder of another search": Row(
        changed_search, {"units": 9}, {"words": "--out other"}, "use another folder with `--out`"
    ),
    "search in the folder of another search, with --restart": Row(
        changed_search, {"units": 9}, {"words": "--restart"}, "delete these trials with `--restart`"
    ),
    "search in the folder of another search, original space": Row(
        changed_search, {"units": 9}, {"units": 8}, "Undo the change"
    ),
    "unknown name for ls": Row(
        command,
        {"words": "ls methods FedVit2"},
        {"words": "ls methods FedViT"},
        "Did you mean FedViT?",
        UnknownNameError,
    ),
    "setting for data ls": Row(command, {"words": "data ls --seed=1"}, {"words": "data ls"}, "Remove them"),
    "setting for data ls, shown": Row(
        command,
        {"words": "data ls --data.seed=1"},
        {"words": "data show quickstart --data.seed=1"},
        "or use `lightning-fcl data show`",
    ),
    "picture of another kind": Row(
        command,
        {"words": "data show quickstart --out stream.jpg"},
        {"words": "data show quickstart --out stream.png"},
        "Use `--out stream.png`",
    ),
    "table of no runs": Row(
        table_rows, {"finished": True}, {"finished": False}, "Remove `--finished-only`", MissingValueError
    ),
    "unknown method of a leaderboard": Row(
        lambda lab, text: match_names(text, ["FedAvg", "EWC"], "methods"),
        {"text": "FedAvgg"},
        {"text": "FedAvg"},
        "Did you mean FedAvg?",
        UnknownNameError,
        "methods",
    ),
    "fetch of nothing": Row(
        command,
        {"words": "zoo download"},
        {"words": f"zoo download {NAME}"},
        "Pass a name from `lightning-fcl zoo ls`",
        MissingValueError,
    ),
}


# Rows about recipes


def recipe(lab, words="", files=()):
    """Resolve the quickstart recipe with overrides, as a command does."""
    paths = [recipes_folder() / "quickstart.yaml", *(written(lab, f"{n}.yaml", text) for n, text in enumerate(files))]
    return resolve_recipe(Recipe.from_words([*(f"--config={path}" for path in paths), *shlex.split(words)]))


def trainer(lab, **arguments):
    with convert_errors():
        return L.Trainer(**{**lab.quiet, **arguments})


def fit_monitored(lab, monitor):
    class Logging(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).sum()
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callbacks = [EarlyStopping(monitor, check_on_train_epoch_end=True)]
    with convert_errors():
        L.Trainer(**lab.quiet, max_epochs=1, callbacks=callbacks).fit(Logging(), torch.ones(2, 2))


def module_of_a_folder(lab, folder):
    written(lab, "project/of_a_project.py", "from lightning_fcl import Classifier as Mine")
    lab.env.chdir(lab.folder / folder)
    lab.env.syspath_prepend(str(lab.folder / folder))
    recipe(lab, "--model of_a_project.Mine")


def fit_words(lab, words, prepare=None):
    """Fit the quickstart recipe with additional arguments, for one round by default."""
    command(lab, f"fit quickstart {SMALL} --out out {words}", prepare)


def fit_callbacks(lab, callbacks):
    fit_words(lab, f"--config {written(lab, 'callbacks.yaml', CALLBACK.format(callbacks))}")


CALLBACK = "trainer: {{callbacks: [{}]}}"
ONLINE = (
    "data: {{scenario: {{class_path: Online, init_args: "
    "{{scenario: {{class_path: {}, init_args: {{blurry_ratio: 0.1}}}}}}}}}}"
)

ROWS |= {
    "unknown accelerator": Row(
        trainer,
        {"accelerator": "cpuu"},
        {"accelerator": "cpu"},
        "Did you mean cpu?",
        UnknownNameError,
        "trainer.accelerator",
    ),
    "unknown strategy": Row(
        trainer,
        {"strategy": "federatd"},
        {"strategy": "federated"},
        "Did you mean federated?",
        UnknownNameError,
        "trainer.strategy",
    ),
    "accelerator that this machine lacks": Row(
        trainer,
        {"accelerator": "tpu"},
        {"accelerator": "cpu"},
        "Use `--trainer.accelerator cpu`",
        argument="trainer.accelerator",
    ),
    "metric that is not logged": Row(
        fit_monitored,
        {"monitor": "train/los"},
        {"monitor": "train/loss"},
        "Did you mean train/loss?",
        UnknownNameError,
        "monitor",
    ),
    "same callback twice": Row(
        fit_callbacks,
        {"callbacks": "{class_path: ContinualMetrics}, {class_path: ContinualMetrics}"},
        {"callbacks": "{class_path: ContinualMetrics}"},
        "Remove all but one",
        argument="trainer.callbacks",
    ),
    "same method twice": Row(
        fit_callbacks,
        {"callbacks": "{class_path: lightning_fcl.callbacks.Replay}, {class_path: lightning_fcl.callbacks.Replay}"},
        {"callbacks": "{class_path: lightning_fcl.callbacks.Replay}"},
        "Keep one `Replay`, and remove the others",
        argument="callbacks",
    ),
    "unknown argument of the data": Row(
        recipe,
        {"words": "--data.batchsize 8"},
        {"words": "--data.batch_size 8"},
        "Did you mean data.batch_size?",
        UnknownNameError,
        "data.batchsize",
    ),
    "unknown argument of a part": Row(
        recipe,
        {"words": "--data.clents 3"},
        {"words": "--data.partition.num_clients 3"},
        "Did you mean data.partition.num_clients?",
        UnknownNameError,
        "data.clents",
    ),
    "unknown argument without a similar name": Row(
        recipe,
        {"words": "--trainer.strategy.compression TopK --trainer.strategy.compression.share 0.5"},
        {"words": "--trainer.strategy.compression TopK --trainer.strategy.compression.fraction 0.5"},
        "Use fraction, bits",
        UnknownNameError,
        "trainer.strategy.compression.share",
    ),
    "number of epochs that is text": Row(
        recipe,
        {"words": "--trainer.max_epochs many"},
        {"words": ""},
        "Leave it out",
        InvalidTypeError,
        "trainer.max_epochs",
    ),
    "short class name in a nested scenario": Row(
        recipe,
        {"files": [ONLINE.format("Blurry")]},
        {"files": [ONLINE.format("lightning_fcl.data.scenarios.Blurry")]},
        "Write lightning_fcl.data.scenarios.Blurry",
        argument="data.scenario.scenario",
    ),
    "arguments below the name of their class": Row(
        recipe,
        {"files": [CALLBACK.format("lightning_fcl.callbacks.EWC: {strength: 3}")]},
        {"files": [CALLBACK.format("{class_path: lightning_fcl.callbacks.EWC, init_args: {'strength': 3}}")]},
        "Write {class_path: lightning_fcl.callbacks.EWC, init_args: {'strength': 3}}",
        argument="trainer.callbacks",
    ),
    "name of several classes": Row(
        recipe,
        {
            "words": "--model.model MLP --model.model.sizes [64,10]",
            "files": ["model: {class_path: Classifier, init_args: {model: {class_path: MLP, init_args: {}}}}"],
        },
        {
            "words": "--model.model lightning_fcl.models.small.MLP --model.model.sizes [64,10]",
            "files": ["model: {class_path: Classifier}"],
        },
        "Write the full name of one of them: lightning_fcl.models.small.MLP",
    ),
    "unknown callback": Row(
        recipe,
        {"files": [CALLBACK.format("{class_path: Replays}")]},
        {"files": [CALLBACK.format("{class_path: Replay}")]},
        "Did you mean Replay?",
        UnknownNameError,
        "trainer.callbacks",
    ),
    "unknown class without a similar name": Row(
        recipe,
        {"words": "--model.optimizer Zzz"},
        {"words": "--model.optimizer torch.optim.SGD"},
        "Write the full name of a class, as in torch.optim.SGD",
        UnknownNameError,
        "model.optimizer",
    ),
    "unknown module": Row(
        recipe,
        {"files": [CALLBACK.format("{class_path: lightning_fc.callbacks.Replay}")]},
        {"files": [CALLBACK.format("{class_path: lightning_fcl.callbacks.Replay}")]},
        "Did you mean lightning_fcl?",
        UnknownNameError,
        "trainer.callbacks",
    ),
    "module in another folder": Row(
        module_of_a_folder,
        {"folder": "."},
        {"folder": "project"},
        "Run the command in project",
        UnknownNameError,
        "model",
    ),
    "unknown class of a module": Row(
        recipe,
        {"words": "--model.optimizer torch.optim.SDG"},
        {"words": "--model.optimizer torch.optim.SGD"},
        "Did you mean SGD?",
        UnknownNameError,
        "model.optimizer",
    ),
    "function instead of a class": Row(
        recipe,
        {"files": [CALLBACK.format("{class_path: os.getcwd}")]},
        {"files": [CALLBACK.format("{class_path: lightning_fcl.callbacks.Replay}")]},
        "Name a class in `class_path`",
        InvalidTypeError,
        "trainer.callbacks",
    ),
    "unknown command of Lightning": Row(
        lambda lab, word: make_cli(
            [word, f"--config={lab.run() / 'config.yaml'}", f"--ckpt_path={lab.checkpoint()}"], FederatedCLI
        ),
        {"word": "tset"},
        {"word": "test"},
        "Did you mean test?",
        UnknownNameError,
    ),
    "weights of any kind": Row(
        fit_words,
        {
            "words": "--ckpt_path run/checkpoints/last.ckpt --weights_only false --trainer.max_epochs 2",
            "prepare": with_run,
        },
        {"words": "--ckpt_path run/checkpoints/last.ckpt --trainer.max_epochs 2"},
        "Remove `weights_only`",
        argument="weights_only",
    ),
    "no round": Row(
        fit_words, {"words": "--trainer.max_epochs 0"}, {"words": "--trainer.max_epochs 1"}, "Increase this limit"
    ),
    "no recipe": Row(
        lambda lab, files: load_recipe(Recipe(files)),
        {"files": ()},
        {"files": (recipes_folder() / "quickstart.yaml",)},
        "Pass the name or the file of a recipe",
        MissingValueError,
    ),
    "recipe within a recipe": Row(
        recipe,
        {"files": ["config: more.yaml"]},
        {"files": ["trainer: {max_epochs: 3}"]},
        "Pass further recipes on the command line",
        UnknownNameError,
        "config",
    ),
    "command within a recipe": Row(
        recipe,
        {"files": ["subcommand: fit"]},
        {"files": ["trainer: {max_epochs: 3}"]},
        "Pass the command on the command line",
        UnknownNameError,
        "subcommand",
    ),
    "folder instead of a recipe": Row(
        command,
        {"words": "fit quickstart --config run --print_config", "prepare": with_run},
        {"words": "fit quickstart --config run/config.yaml --print_config"},
        "Pass a file",
    ),
    "missing recipe": Row(
        command,
        {"words": "fit nothing.yaml --print_config"},
        {"words": "fit quickstart --print_config"},
        "or a name from `lightning-fcl ls recipes`",
        MissingFileError,
    ),
    "--config of nothing": Row(
        lambda lab, words: take_settings(words, ["--out"]),
        {"words": ["--config"]},
        {"words": ["--config=a.yaml"]},
        "Write --config=FILE",
        MissingValueError,
        "--config",
    ),
    "setting without a value": Row(
        lambda lab, words: take_settings(words, ["--out"]),
        {"words": ["--trainer.max_epochs"]},
        {"words": ["--trainer.max_epochs=3"]},
        "Write --trainer.max_epochs=VALUE.",
        MissingValueError,
        "--trainer.max_epochs",
    ),
    "abbreviated option": Row(
        lambda lab, words: take_settings(words, ["--root"]),
        {"words": ["--rot"]},
        {"words": ["--root", "x"]},
        "Did you mean --root?",
        MissingValueError,
        "--rot",
    ),
    "argument beside a class": Row(
        recipe,
        {"files": ["model: {optimizer: {class_path: torch.optim.SGD, lr: 0.1}}"]},
        {"files": ["model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}}"]},
        "Write it in `init_args`, as in init_args: {lr: ...}",
        UnknownNameError,
        "lr",
    ),
    "misspelt key of a class": Row(
        recipe,
        {"files": ["model: {optimizer: {class_path: torch.optim.SGD, init_arg: {lr: 0.1}}}"]},
        {"files": ["model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}}"]},
        "Did you mean init_args?",
        UnknownNameError,
        "init_arg",
    ),
    "setting of an unlisted callback": Row(
        recipe,
        {"words": "--trainer.callbacks.Repaly.memory_size 5"},
        {"words": "--trainer.callbacks.Replay.memory_size 5"},
        "Did you mean Replay?",
        UnknownNameError,
    ),
    "missing run": Row(
        lambda lab, name: find_recipe(str(lab.run() / name)),
        {"name": "nothing"},
        {"name": "config.yaml"},
        "Pass a YAML file.",
        MissingFileError,
    ),
    "unknown recipe": Row(
        lambda lab, name: find_recipe(name),
        {"name": "flwf/flwf-2t-tf"},
        {"name": "flwf/flwf-2t-ft"},
        "Did you mean flwf/flwf-2t-ft?",
        UnknownNameError,
    ),
}


# Rows about results


def results_of(lab):
    return read_results(lab.run())


def change_results(lab, **changes):
    """Change the results of the copied run, but not their checksum."""
    path = lab.run() / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def fit_again(lab):
    shutil.rmtree(lab.folder / "run")
    lab.run()


def read_damaged(lab, damage):
    """Read the results of a copied run. The first call copies the run and damages the results."""
    if not (lab.folder / "run").exists():
        lab.run()
        damage(lab)
    return results_of(lab)


def table_of(lab, change=None):
    """Write a table, damage it with ``change`` if given, and read it."""
    path = lab.folder / "table.json"
    write_table(
        lab.folder, Results.from_results([read_results(lab.run())], "toy", "paper", "lightning-fcl reproduce toy")
    )
    if change is not None:
        path.write_text(change(path.read_text()))
    return read_table(path)


def fit_clients(lab, clients):
    """Fit with the setting `clients` of `ContinualMetrics`, and draw the accuracy by task."""
    metrics = f"{{class_path: lightning_fcl.callbacks.ContinualMetrics, init_args: {{clients: {clients}}}}}"
    file = written(lab, "metrics.yaml", f"trainer: {{callbacks+: [{metrics}]}}")
    shutil.rmtree(lab.folder / "out", ignore_errors=True)
    rounds = "--data.scenario.num_experiences 2 --data.scenario.rounds_per_experience 1 --trainer.max_epochs 2"
    fit_words(lab, f"--config {file} {rounds}")
    return draw_tasks({"panel": {"line": ("row", [read_results(lab.folder / "out")])}}, "Title")


def fit_clock(lab, clock):
    """Fit with or without a simulated clock, and compute the time to an accuracy."""
    schedule = {"class_path": "lightning_fcl.Deadline", "init_args": {"speeds": SPEEDS}} if clock else None
    file = written(lab, "clock.yaml", {"trainer": {"strategy": {"init_args": {"synchronization": schedule}}}})
    shutil.rmtree(lab.folder / "out", ignore_errors=True)
    fit_words(lab, f"--config {file}")
    return time_to(read_results(lab.folder / "out")["record"], 0.0)


SPEEDS = {"class_path": "lightning_fcl.ClientSpeeds", "init_args": {"seconds_per_sample": 0.01}}

ROWS |= {
    "comparison of no runs": Row(
        lambda lab, names: compare_page({name: [read_results(lab.run())] for name in names}),
        {"names": ()},
        {"names": ("run",)},
        "Pass the result of `runs_by_name`",
        MissingValueError,
    ),
    "folder without a run": Row(
        lambda lab, name: find_runs([lab.run() / name]),
        {"name": "checkpoints"},
        {"name": "."},
        "Pass a folder that `lightning-fcl fit` has written",
        MissingFileError,
    ),
    "run without a round": Row(
        read_record, {"change": lambda line: b""}, {"change": bytes}, "Wait for the end of the first round."
    ),
    "damaged record": Row(
        read_record,
        {"change": lambda line: b"{" + line},
        {"change": bytes},
        "Repeat the run in another folder.",
        DamagedFileError,
    ),
    "figure of clients that were not tested": Row(
        fit_clients, {"clients": "none"}, {"clients": "all"}, 'Run the row with `ContinualMetrics(clients="all")`'
    ),
    "two runs of a seed": Row(
        lambda lab, runs: cells([read_results(lab.run()) for _ in range(runs)]),
        {"runs": 2},
        {"runs": 1},
        "Leave out one of the two runs",
    ),
    "missing results": Row(
        read_damaged,
        {"damage": lambda lab: (lab.run() / "results.json").unlink()},
        fit_again,
        "or repeat the run",
        MissingFileError,
    ),
    "results that are not JSON": Row(
        read_damaged,
        {"damage": lambda lab: (lab.run() / "results.json").write_text("{")},
        fit_again,
        "or repeat the run",
    ),
    "results of another format": Row(
        read_damaged, {"damage": lambda lab: change_results(lab, format=0)}, fit_again, "or repeat the run"
    ),
    "results that have changed": Row(
        read_damaged, {"damage": lambda lab: change_results(lab, seed=7)}, fit_again, "Repeat the run"
    ),
    "table that is damaged": Row(
        table_of,
        {"change": lambda text: text.replace('"values"', '"value"')},
        {"change": None},
        "Write the table with `lightning-fcl reproduce`",
    ),
    "table that is not JSON": Row(
        table_of, {"change": lambda text: text[1:]}, {"change": None}, "Write the table with `lightning-fcl reproduce`"
    ),
    "record without a clock": Row(
        fit_clock, {"clock": False}, {"clock": True}, "Give the strategy a `synchronization`"
    ),
}


# Rows about devices


class Wrong(nn.Module):
    """A module whose exported graph computes a different output."""

    def forward(self, x):
        return x + 0.01 * torch.onnx.is_in_onnx_export()


LINEAR, EXAMPLE = nn.Linear(2, 1), torch.zeros(3, 2)


def export(lab, module=LINEAR, example=EXAMPLE, tolerance=1e-4, output_names=None):
    return export_onnx(module, example, lab.folder / "net.onnx", tolerance=tolerance, output_names=output_names)


class Returns(nn.Module):
    """A module that returns a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def export_int8(lab, scores):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    module = nn.Sequential(layers, Returns(lambda x: {"double": 2 * x, "logits": x}))
    return export_int8_onnx(
        module, torch.rand(8, 1, 4, 4), torch.rand(4, 1, 4, 4), lab.folder / "net.onnx", 0, None, scores
    )


if find_spec("onnxruntime"):
    ROWS |= {
        "export of no samples": Row(
            export,
            {"example": torch.zeros(0, 2)},
            {"example": torch.zeros(3, 2)},
            "Pass inputs of shape (n, ...)",
            argument="example",
        ),
        "export that differs": Row(
            export,
            {"module": Wrong(), "tolerance": 0.001},
            {"tolerance": 0.1},
            "Raise `tolerance`",
        ),
        "export of a number": Row(
            export,
            {"module": Returns(lambda x: (x, 1))},
            {"module": Returns(lambda x: (x, x.new_ones(1)))},
            "Wrap the module in a module that returns only tensors.",
            InvalidTypeError,
        ),
        "export of no tensor": Row(
            export,
            {"module": Returns(lambda x: {})},
            {"module": Returns(lambda x: {"sum": x.sum(1)})},
            "Wrap the module in a module that returns only tensors.",
            InvalidTypeError,
        ),
        "export of complex numbers": Row(
            export,
            {"module": Returns(lambda x: torch.complex(x, x))},
            {"module": Returns(lambda x: torch.view_as_real(torch.complex(x, x)))},
            "or `torch.view_as_real(output)` for complex numbers.",
            InvalidTypeError,
        ),
        "export of bfloat16": Row(
            export,
            {"module": Returns(lambda x: x.bfloat16())},
            {"module": Returns(lambda x: x.bfloat16().float())},
            "Return `output.float()`",
            InvalidTypeError,
        ),
        "export of equal names": Row(
            export,
            {"module": Returns(lambda x: {"a": [x], "a_0": x})},
            {"module": Returns(lambda x: {"a": [x], "b": x})},
            "Rename one of the keys or fields that `forward` returns.",
        ),
        "export with too few names": Row(
            export,
            {"module": Returns(lambda x: {"a": x, "b": x + 1}), "output_names": ["c"]},
            {"output_names": ["a", "b"]},
            "Pass for example `output_names=['a', 'b']`, or `--output-names a,b`.",
            argument="output_names",
        ),
        "export of an output with the name of the input": Row(
            export,
            {"module": Returns(lambda x: {"input": x + 1})},
            {"output_names": ["input_output"]},
            "Pass for example `output_names=['input_output']`",
        ),
        "export with several inputs": Row(
            export,
            {"module": nn.Bilinear(1, 1, 2), "example": (torch.rand(3, 1), torch.rand(3, 1))},
            {
                "module": nn.Sequential(Returns(lambda x: x[:, :1] * x[:, 1:]), nn.Linear(1, 2)),
                "example": torch.rand(3, 2),
            },
            "Wrap the module in a module that takes one tensor and splits it.",
            InvalidTypeError,
            "example",
        ),
        "int8 export of several outputs": Row(
            export_int8,
            {"scores": None},
            {"scores": "logits"},
            "Pass the name of the output with the class scores in `scores`",
            argument="scores",
        ),
        "command that exports names to ExecuTorch": Row(
            command,
            {"words": "export run --format executorch --output-names a", "prepare": with_run},
            {"words": "export run --output-names a"},
            "Remove `--output-names`, or use `--format onnx`.",
            argument="--output-names",
        ),
        "command that exports scores without int8": Row(
            command,
            {"words": "export run --scores output", "prepare": with_run},
            {"words": "export run"},
            "Add `--int8`, or remove `--scores`.",
            argument="--scores",
        ),
    }

ROWS |= {
    "unknown device": Row(
        lambda lab, profile: device_report(nn.Linear(6, 2), (6,), profile=profile),
        {"profile": "gap9-lpn"},
        {"profile": "gap9-lpm"},
        "Did you mean gap9-lpm?",
        UnknownNameError,
        "profile",
    ),
}


# Rows about files


CONTENT = bytes(range(256)) * 20
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def fetch_file(lab, digest=DIGEST, path="file.bin"):
    """Download a file from a server. The server has the file only after a call of `offer`."""
    (lab.folder / "server").mkdir(exist_ok=True)
    if not hasattr(lab, "url"):
        lab.url, lab.asked = lab.serve(lab.folder / "server")
    return download(f"{lab.url}/file.bin", lab.folder / path, digest)


def offer(lab):
    (lab.folder / "server").mkdir(exist_ok=True)
    (lab.folder / "server" / "file.bin").write_bytes(CONTENT)


def offered(lab, **arguments):
    offer(lab)
    return fetch_file(lab, **arguments)


def offline(lab):
    if not hasattr(lab, "url"):
        lab.env.setenv("LIGHTNING_FCL_OFFLINE", "1")
    return offered(lab)


def go_online(lab):
    lab.env.delenv("LIGHTNING_FCL_OFFLINE")


def by_hand(lab):
    (lab.folder / "file.bin").write_bytes(CONTENT)


def write_on(lab, limit):
    with lab.full_disk(limit) if limit else nullcontext():
        return write_atomic(lab.folder / "mine.bin", CONTENT)


def download_on(lab, limit):
    offer(lab)
    with lab.full_disk(limit) if limit else nullcontext():
        return fetch_file(lab)


def archive(lab, before=lambda lab: None):
    """Return a data source whose archive is on a server. The first call makes the source, and then calls ``before``."""
    if not hasattr(lab, "source"):
        written(lab, "packed/original/train.csv", "1,0")
        (lab.folder / "server").mkdir()
        file = shutil.make_archive(str(lab.folder / "server" / "x"), "zip", lab.folder / "packed")
        words = dict.fromkeys(("title", "content", "license", "citation", "size", "expected_files"), "x")
        lab.url, _ = lab.serve(lab.folder / "server")
        layouts = (Layout("folder", ("x/original",), markers=("train.csv",)),)
        lab.source = Source(
            name="x",
            layouts=layouts,
            archive="x/x.zip",
            folder="original",
            url=f"{lab.url}/x.zip",
            digest=sha256(Path(file)),
            **words,
        )
        before(lab)
    return lab.source


def in_the_way(lab):
    written(lab, "data/x/original/other.txt", "x")


def occupy(lab, folder):
    with run_lock(lab.folder / "run"):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
    return status


def remote_checkpoint(lab, end):
    if not hasattr(lab, "url"):
        (lab.folder / "server").mkdir()
        shutil.copy(lab.checkpoint(), lab.folder / "server" / "last.ckpt")
        lab.url, _ = lab.serve(lab.folder / "server")
    digest = sha256(lab.folder / "server" / "last.ckpt")
    return require_checkpoint_file(
        f"{lab.url}/last.ckpt{end.format(digest)}" if end != "path" else str(lab.checkpoint())
    )


def fit_from_checkpoint(lab, **options):
    """Resume the fit of a run with `Trainer.fit`."""
    parts = load_recipe(Recipe((lab.run() / "config.yaml",)))
    parts.make_trainer().fit(parts.model, datamodule=parts.datamodule, ckpt_path=lab.checkpoint(), **options)


def load_checkpoint(lab, name):
    """Read a checkpoint from a folder that also has a truncated checkpoint."""
    path = lab.checkpoint()
    cut = path.with_name("zcut.ckpt")
    cut.write_bytes(path.read_bytes()[:1000])
    if not path.with_name("whole.ckpt").exists():
        shutil.copy(path, path.with_name("whole.ckpt"))
    return read_checkpoint(torch.load, path.with_name(name))


def limited(lab, limit):
    lab.env.setenv("LIGHTNING_FCL_MAX_BYTES", limit)
    return read_checkpoint(torch.load, lab.checkpoint())


def digest_of(lab):
    """Check the digest of the weights of the copied model. The first call damages the weights."""
    path = lab.entry() / WEIGHTS
    if not hasattr(lab, "digest"):
        lab.digest = sha256(path)
        path.write_bytes(path.read_bytes()[:-1])
    return check_digest(path, lab.digest)


def copy_again(lab):
    shutil.rmtree(lab.folder / "zoo" / NAME)
    lab.entry()


def read_list(lab, text):
    return read_checksums(written(lab, "files.txt", text))


def link_out(lab, name):
    (lab.folder / "inner").mkdir(exist_ok=True)
    if not (lab.folder / "inner" / "linked").exists():
        (lab.folder / "inner" / "linked").symlink_to(lab.folder)
    return safe_join(lab.folder / "inner", name)


ROWS |= {
    "full disk": Row(write_on, {"limit": 1000}, {"limit": None}, "Free disk space, then", DiskFullError),
    "full disk of a download": Row(
        download_on, {"limit": 1000}, {"limit": None}, "Free disk space, then try again", DiskFullError
    ),
    "missing folder": Row(
        lambda lab, name="new/mine.txt": write_atomic(lab.folder / name, "x"),
        {},
        lambda lab: (lab.folder / "new").mkdir(),
        "Create the parent folder",
        FileAccessError,
    ),
    "missing folder, other path": Row(
        lambda lab, name: write_atomic(lab.folder / name, "x"),
        {"name": "new/mine.txt"},
        {"name": "mine.txt"},
        "or use another folder",
        FileAccessError,
    ),
    "cache that is a file": Row(
        lambda lab, cache: (
            lab.env.setenv("LIGHTNING_FCL_CACHE", str(written(lab, "file", "x").with_name(cache))),
            offered(lab, path=f"{cache}/file.bin"),
        ),
        {"cache": "file"},
        {"cache": "folder"},
        "or use another folder (set LIGHTNING_FCL_CACHE)",
        FileAccessError,
    ),
    "file that is missing on the server": Row(fetch_file, {}, offer, "Try again", ConnectionFailedError),
    "file that is missing on the server, copied manually": Row(
        fetch_file, {}, by_hand, "or download the file by hand to", ConnectionFailedError
    ),
    "download in offline mode": Row(offline, {}, go_online, "Unset LIGHTNING_FCL_OFFLINE", ConnectionFailedError),
    "download in offline mode, copied manually": Row(
        offline, {}, by_hand, "to this path by hand", ConnectionFailedError
    ),
    "download of another digest": Row(
        offered, {"digest": "0" * 64}, {"digest": DIGEST}, "ask its publisher for the new digest"
    ),
    "missing data": Row(
        lambda lab: archive(lab).find(lab.folder / "data"),
        {},
        lambda lab: lab.source.download(lab.folder / "data"),
        "Run `lightning-fcl data download x`",
        MissingFileError,
    ),
    "archive that cannot be unpacked": Row(
        lambda lab: archive(lab, in_the_way).download(lab.folder / "data"),
        {},
        lambda lab: shutil.rmtree(lab.folder / "data" / "x" / "original"),
        "If the disk is full, free disk space. Otherwise, delete ",
        FileAccessError,
    ),
    "checkpoint at a URL": Row(
        remote_checkpoint, {"end": ""}, {"end": "#sha256={}"}, "Append `#sha256=` and the 64 digits"
    ),
    "checkpoint at a URL, downloaded manually": Row(
        remote_checkpoint, {"end": ""}, {"end": "path"}, "or download the file and pass its path"
    ),
    "checkpoint with objects": Row(
        fit_from_checkpoint,
        {"weights_only": False},
        {"weights_only": None},
        "Remove `weights_only`",
        argument="weights_only",
    ),
    "missing checkpoint": Row(
        load_checkpoint,
        {"name": "nothing.ckpt"},
        {"name": "whole.ckpt"},
        "the newest undamaged checkpoint there",
        MissingFileError,
    ),
    "truncated checkpoint": Row(
        load_checkpoint,
        {"name": "zcut.ckpt"},
        {"name": "whole.ckpt"},
        "the newest undamaged checkpoint there",
        DamagedFileError,
    ),
    "checkpoint above the limit": Row(
        limited, {"limit": "100"}, {"limit": "100000000"}, "set LIGHTNING_FCL_MAX_BYTES to at least", DamagedFileError
    ),
    "limit that is not a number": Row(
        limited,
        {"limit": "3 GB"},
        {"limit": "3000000000"},
        "Set LIGHTNING_FCL_MAX_BYTES to a whole number",
        LimitSettingError,
    ),
    "folder that is not a run": Row(
        lambda lab, name: get_run_checkpoint(lab.run().parent / name),
        {"name": "."},
        {"name": "run"},
        "Pass the folder that `lightning-fcl fit` wrote to",
        MissingFileError,
    ),
    "file of another digest": Row(digest_of, {}, copy_again, "Delete this copy and get the file again"),
    "list of files with invalid lines": Row(
        read_list, {"text": "a\n"}, {"text": f"a {DIGEST}\n"}, "Delete this copy and get the file again"
    ),
    "name that leads out of the folder": Row(
        link_out, {"name": ".."}, {"name": "a_b-1"}, "Use a name of letters, digits, `_` and `-`"
    ),
    "link that leads out of the folder": Row(
        link_out, {"name": "linked"}, {"name": "plain"}, "that is not a link to another folder"
    ),
    "key that a file repeats": Row(
        lambda lab, text: read_yaml(written(lab, "a.yaml", text)),
        {"text": "a: 1\na: 2\n"},
        {"text": "a: 1\n"},
        "Remove one of the two keys",
    ),
    "values too deep": Row(
        lambda lab, depth: read_yaml(written(lab, "a.yaml", "[" * depth + "]" * depth)),
        {"depth": 101},
        {"depth": 100},
        "Use fewer levels",
    ),
    "values that aliases repeat": Row(
        lambda lab, aliases: read_yaml(
            written(lab, "a.yaml", f"a: &a [{'1, ' * 999}1]\nb: [{', '.join(['*a'] * aliases)}]\n")
        ),
        {"aliases": 200},
        {"aliases": 20},
        "Use fewer values or aliases",
    ),
    "recursive value": Row(
        lambda lab, text: read_yaml(written(lab, "a.yaml", text)),
        {"text": "a: &a [*a]\n"},
        {"text": "a: [[]]\n"},
        "Write the value out, without an alias",
    ),
}


# Rows of the table of hints: the zoo


def in_zoo(lab, name=NAME, **settings):
    """Load a model by its name from a separate zoo."""
    lab.entry()
    lab.env.setenv("LIGHTNING_FCL_ZOO", str(lab.folder / "zoo"))
    return zoo.load(name, **settings)


def relist(lab, **changes):
    """Change the configuration of the copied model, and update the checksums of its files."""
    folder = lab.entry()
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / CHECK).unlink(missing_ok=True)
    write_entry_checksums(folder)
    return folder


def features_entry(lab):
    return relist(lab, classes=[], output_kind="features") if not (lab.folder / "zoo").exists() else lab.entry()


def predict_features(lab, head):
    folder = features_entry(lab)
    x = np.zeros((1, 1, 8, 8))
    if head:
        return zoo.create_model(str(folder), pretrained=True, num_classes=3)(torch.zeros(1, 1, 8, 8))
    return zoo.load(folder).predict(x)


def once(lab, damage, read):
    """Read the copied model. The first call damages the model before it is read."""
    if not (lab.folder / "zoo").exists():
        damage(lab.entry())
    return read(lab.entry())


def change_weights(folder):
    state = load_file(folder / WEIGHTS)
    save_file({name: value + 1 for name, value in state.items()}, folder / WEIGHTS)
    write_entry_checksums(folder)


def changed_weights(lab, **settings):
    return once(lab, change_weights, lambda folder: zoo.load(folder, **settings))


def move_entry(lab):
    """Rename the folder of the copied model, and change the name in the registry."""
    registry = lab.entry().parent / REGISTRY
    (lab.folder / "zoo" / NAME).rename(lab.folder / "zoo" / "mlp.other")
    registry.write_text(registry.read_text().replace(NAME, "mlp.other"))


def moved_entry(lab):
    if not (lab.folder / "zoo").exists():
        move_entry(lab)
    lab.env.setenv("LIGHTNING_FCL_ZOO", str(lab.folder / "zoo"))
    return zoo.load(NAME if (lab.folder / "zoo" / NAME).exists() else "mlp.other")


def move_back(lab):
    registry = lab.folder / "zoo" / REGISTRY
    (lab.folder / "zoo" / "mlp.other").rename(lab.folder / "zoo" / NAME)
    registry.write_text(registry.read_text().replace("mlp.other", NAME))


def packaged(lab, setting=None):
    """Load a model whose weights are not in the package."""
    inner = lab.entry("package").parent
    (inner / NAME / WEIGHTS).unlink(missing_ok=True)
    lab.env.setattr("lightning_fcl.zoo.registry.package_folder", lambda: inner)
    if setting == "folder":
        lab.env.setenv("LIGHTNING_FCL_ZOO", str(lab.entry().parent))
    if setting == "url":
        lab.env.setenv("LIGHTNING_FCL_ZOO", lab.serve(lab.entry().parent)[0])
    return zoo.load(NAME)


def without_weights(lab):
    """Load a model from a separate zoo. The first call moves the weights out of this zoo."""
    if not (lab.folder / "zoo").exists():
        weights = lab.entry() / WEIGHTS
        weights.rename(lab.folder / WEIGHTS)
    lab.env.setenv("LIGHTNING_FCL_ZOO", str(lab.folder / "zoo"))
    return zoo.load(NAME)


def copy_weights(lab):
    (lab.folder / WEIGHTS).rename(lab.folder / "zoo" / NAME / WEIGHTS)


def damaged_registry(lab):
    if not (lab.folder / "zoo").exists():
        lab.entry()
        written(lab, f"zoo/{REGISTRY}", f"../{CHECKSUMS_FILE} {DIGEST}\n")
    return in_zoo(lab)


def registry_again(lab):
    (lab.folder / "zoo" / REGISTRY).unlink()
    register(lab.entry())


def collect_beside(lab):
    """Copy a model to a registry that already contains a different model in the folder of the same name."""
    other = lab.folder / "to" / NAME
    if not hasattr(lab, "other"):
        lab.other = other
        other.mkdir(parents=True)
        config = json.loads((lab.entry() / CONFIG).read_text()) | {"name": "mlp.other"}
        (other / CONFIG).write_text(json.dumps(config))
    return copy_to_registry(lab.entry(), lab.folder / "to")


def publish_run(lab, to):
    licence = {"weights": "Apache-2.0", "data": "CC BY 4.0"}
    return publish(lab.run(), "mlp.mine", str(lab.folder / to) if "://" not in to else to, license=licence)


def samples_of(lab, text):
    return read_samples(written(lab, "x.csv", text), zoo.load("esn.ucihar.incfed").entry)


def two_samples(line):
    return "\n".join([line] * 256)


ROWS |= {
    "new classes for a network without a ridge readout": Row(
        lambda lab, classes=None, head=None: (
            zoo.create_model(NAME, pretrained=True, num_classes=head) if head else continue_from(NAME, classes=classes)
        ),
        {"classes": 2},
        {"head": 12},
        "or create a new head with `create_model(..., num_classes=...)`",
    ),
    "new classes for a network without a ridge readout, removed": Row(
        lambda lab, classes: continue_from(NAME, classes=classes),
        {"classes": 2},
        {"classes": None},
        "Leave `classes` out",
    ),
    "clients of another run": Row(
        lambda lab, clients: continue_from(NAME, clients=lab.checkpoint() if clients else None),
        {"clients": True},
        {"clients": False},
        "Leave `clients` out",
        argument="clients",
    ),
    "damaged state for continued training": Row(
        lambda lab: once(
            lab,
            lambda folder: (folder / CONTINUE).write_bytes(b"x"),
            lambda folder: read_continuation(folder / CONTINUE),
        ),
        {},
        copy_again,
        "Delete this copy and get the file again",
    ),
    "damaged configuration": Row(
        lambda lab: once(
            lab, lambda folder: (folder / CONFIG).write_text("{}"), lambda folder: read_entry(folder / CONFIG)
        ),
        {},
        copy_again,
        "Delete this copy and get the file again",
    ),
    "folder without a list of files": Row(
        lambda lab, name: zoo.load(lab.entry().parent / name),
        {"name": "."},
        {"name": NAME},
        "Pass the folder of a published model",
        MissingFileError,
    ),
    "list of other files": Row(
        lambda lab: once(lab, lambda folder: (folder / CHECKSUMS_FILE).write_text(f"a {DIGEST}\n"), read_files),
        {},
        copy_again,
        "Delete this copy and get the file again",
    ),
    "damaged tensors": Row(
        lambda lab: once(
            lab, lambda folder: (folder / WEIGHTS).write_bytes(b"x"), lambda folder: read_tensors(folder / WEIGHTS)
        ),
        {},
        copy_again,
        "Delete this copy and get the file again",
    ),
    "class instead of a published name": Row(
        lambda lab, name: zoo.create_model(name, pretrained=True),
        {"name": "MLP"},
        {"name": NAME},
        "Use one of the published names",
        UnknownNameError,
    ),
    "network without a reservoir": Row(
        lambda lab, name: zoo.pretrained_reservoir(name),
        {"name": NAME},
        {"name": "esn.ucihar.incfed"},
        "Use one of esn.",
    ),
    "model with different outputs": Row(
        changed_weights, {}, {"check": False}, "or load the network with `check=False`"
    ),
    "non-finite samples": Row(
        lambda lab, x: zoo.load(relist(lab, measurement=None)).predict(x),
        {"x": np.full((1, 1, 8, 8), np.nan)},
        {"x": np.zeros((1, 1, 8, 8))},
        "Replace these values, or drop these samples",
        argument="x",
    ),
    "classes of a network of features": Row(
        predict_features, {"head": False}, {"head": True}, "or add a head with `create_model("
    ),
    "line with text in a CSV file of samples": Row(
        samples_of,
        {"text": two_samples("1,2,3,4,5,x")},
        {"text": two_samples("1,2,3,4,5,6")},
        "Correct the file. A row number in this message does not count",
    ),
    "surplus lines in a CSV file of samples": Row(
        samples_of,
        {"text": two_samples("1,2,3,4,5,6") + "\n1,2,3,4,5,6"},
        {"text": two_samples("1,2,3,4,5,6")},
        "Delete the lines of the last sample",
    ),
    "publish to a URL": Row(
        publish_run,
        {"to": "https://example.org/zoo"},
        {"to": "published"},
        "Publish to a folder, then copy the folder to the URL",
        argument="destination",
    ),
    "model without weights in the package": Row(
        packaged,
        {},
        {"setting": "folder"},
        "Set LIGHTNING_FCL_ZOO to the folder `zoo` of a checkout",
        MissingFileError,
    ),
    "model without weights in the package, from a URL": Row(
        packaged, {}, {"setting": "url"}, "or to a URL that serves this folder", MissingFileError
    ),
    "model without weights in a folder": Row(
        without_weights, {}, copy_weights, "Copy the missing files to this folder", MissingFileError
    ),
    "folder of another name": Row(moved_entry, {}, move_back, f"Rename the folder to {NAME}, also in registry.txt."),
    "unknown model": Row(
        in_zoo, {"name": "mlp.digit.flwf2t"}, {"name": NAME}, f"Did you mean {NAME}?", UnknownNameError
    ),
    "registry that is damaged": Row(damaged_registry, {}, registry_again, "Delete this copy and get the file again"),
    "folder of another model": Row(
        collect_beside,
        {},
        lambda lab: lab.other.rename(lab.folder / "moved"),
        "Move or delete that folder",
        FileConflictError,
    ),
}


# Rows about deployments


def stream_of(share=0.2, scenario=None, clients=2, **words):
    x, y = torch.randn(80, 6), torch.arange(80) % 4
    owner = [f"{name}" for name in clients] if isinstance(clients, list) else None
    return FederatedStream.from_arrays(
        x,
        y,
        owner,
        scenario=scenario or ClassIncremental(2),
        partition=None if owner else IID(clients),
        split=Split(test=share),
        **words,
    )


def split(lab, **words):
    return write_split(stream_of(**words), lab.folder / "shares")


def own_data(lab, name):
    np.savez(lab.folder / "a.npz", x=np.zeros((4, 6), np.float32), y=np.array(["a", "b"] * 2))
    return read_data(lab.folder / name)


def serve_data(lab, scenario=None, data=True):
    """Set test data of the server. With ``data=False``, use the test samples of the stream instead."""
    stream = stream_of(scenario=scenario)
    np.savez(lab.folder / "a.npz", x=np.zeros((4, 6), np.float32), y=np.array(["a", "b", "c", "d"]))
    if data:
        set_server_data(stream, read_data(lab.folder / "a.npz"), ["0", "1"])
    else:
        stream.setup("fit")
    assert len(stream.plan.test)


def sent(lab, change, largest=1000.0, kind=torch.float32, rule="mean", clients=1):
    state = {"w": torch.ones(4).to(kind)}
    limits = UploadLimits(10**6, 10, 10, largest, clients)
    server = FederatedServer(ClientStore())
    server.start_fit(torch.nn.Module(), extra_tensors={"w": (state["w"], rule)})
    part = ClientRounds.from_rounds([ClientRound("1", 0, num_samples=1)])
    decode_upload(Upload(1, tensors={"w": change(state["w"])}), server, part, limits)


def plan_rounds(lab, columns, scenario=None):
    stream = stream_of(scenario=scenario)
    stream.setup("fit")
    outline = make_outline(stream, stream.plan.clients[0])
    rounds = None if columns is None else np.ones((8, len(outline.experiences) + columns), dtype=bool)
    return client_plan(outline, np.arange(8) % 4, rounds, 0)


SAME = "Deploy the same recipe on all machines"

ROWS |= {
    "incomplete recipe of a deployment": Row(
        lambda lab, whole: read_recipe(written(lab, "r.yaml", recipe(lab) if whole else {"model": {}})),
        {"whole": False},
        {"whole": True},
        "Write the recipe again with `lightning-fcl deploy flower`",
    ),
    "client with the server's name": Row(
        lambda lab, client: split_file(lab.folder, client), {"client": "Server"}, {"client": "ann"}, "Rename the client"
    ),
    "split without test samples": Row(
        split, {"share": 0.0}, {"share": 0.2}, "Increase `test` of `split`", MissingValueError
    ),
    "missing data of a node": Row(
        own_data,
        {"name": "b.npz"},
        {"name": "a.npz"},
        "Set `data` to a file, a folder of images, or a DataModule with its arguments.",
        RejectedMessageError,
        "data",
    ),
    "data of a server, single samples": Row(
        serve_data,
        {"scenario": Online(ClassIncremental(2))},
        {"data": False},
        "Leave `data` and `clients` out",
        argument="data",
    ),
    "swarm in a deployment": Row(
        lambda lab, **words: check_deployable(Participation(**words), Pipeline(), []),
        {"swarm": Swarm()},
        {"swarm": None},
        "Leave `swarm` out",
    ),
    "schedule in a deployment": Row(
        lambda lab, **words: check_deployable(Participation(**words), Pipeline(), []),
        {"synchronization": Deadline(ClientSpeeds(0.01))},
        {"synchronization": None},
        "Leave `synchronization` out",
    ),
    "update that overflows": Row(
        sent,
        {"change": lambda w: w * 3e38},
        {"change": lambda w: w * 1.1},
        "Decrease the learning rate",
        RejectedMessageError,
    ),
    "large update": Row(
        sent,
        {"change": lambda w: w * 100, "largest": 0.5},
        {"change": lambda w: w * 1.1},
        "Decrease the learning rate",
        RejectedMessageError,
    ),
    "large update, allowed": Row(
        sent,
        {"change": lambda w: w * 100, "largest": 0.5},
        {"largest": 1000.0},
        "or increase `max-update-norm`",
        RejectedMessageError,
    ),
    "sum that overflows its type": Row(
        sent,
        {"change": lambda w: w * 100, "kind": torch.int8, "rule": "sum", "clients": 3},
        {"kind": torch.int64},
        "Use a wider type, such as float32 or int64",
        RejectedMessageError,
    ),
    "client id that is not a valid file name": Row(
        lambda lab, name: parse_file_name({"client": name}, "client"),
        {"name": ".."},
        {"name": "ann_1"},
        "Use a name of at most 230 ASCII letters, digits, `_` and `-` for the client",
        RejectedMessageError,
    ),
    "other recipe on a node": Row(
        lambda lab, recipe: check_same({"version": version(), "recipe": recipe}, "ours", "node 1"),
        {"recipe": "theirs"},
        {"recipe": "ours"},
        SAME,
        RejectedMessageError,
    ),
    "other names of a node": Row(
        lambda lab, sent: check_names(sent, ["w"], "node 1"),
        {"sent": ["v"]},
        {"sent": ["w"]},
        SAME,
        RejectedMessageError,
    ),
    "other shapes of a node": Row(
        lambda lab, size: check_tensor("w", torch.zeros(size), torch.zeros(3), "node 1"),
        {"size": 2},
        {"size": 3},
        SAME,
        RejectedMessageError,
    ),
    "upload of another shape": Row(
        sent,
        {"change": lambda w: w[:2]},
        {"change": lambda w: w},
        SAME,
        RejectedMessageError,
    ),
    "round before the last": Row(
        lambda lab, round_idx: (
            written(lab, "round.json", '{"round": 3}'),
            client_state_folder(lab.folder, "1", round_idx),
        ),
        {"round_idx": 1},
        {"round_idx": 3},
        "Start the server from its newest checkpoint",
        RejectedMessageError,
    ),
    "data of other rounds": Row(
        plan_rounds,
        {"columns": 1},
        {"columns": 0},
        "Write the data again with `lightning-fcl deploy split`",
        RejectedMessageError,
    ),
    "data without rounds": Row(
        plan_rounds,
        {"columns": None, "scenario": Online(ClassIncremental(2))},
        {"columns": 0},
        "Write the data with `lightning-fcl deploy split`",
        RejectedMessageError,
    ),
}


# Rows of the table of hints: tables and targets


def read_cells(lab, text="a,b,y\n1,2,p\n", name="t.csv", target="y", features=("a", "b"), **scale):
    written(lab, name, text)
    return len(Table(lab.folder / name, target, features, **scale))


def read_column(lab, kind):
    """Read a Parquet file that has a column of the given type."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = arrow.array([0, 1], arrow.int64()).cast(kind(arrow))
    parquet.write_table(arrow.table({"a": values, "y": ["p", "q"]}), lab.folder / "t.parquet")
    return len(Table(lab.folder / "t.parquet", "y", ["a"]))


def with_row(row):
    return {"text": f"a,b,y\n1,2,p\n{row}\n"}


def with_header(header):
    return {"text": f"{header}\n1,2,p\n"}


ROWS |= {
    "table of another kind": Row(
        read_cells, {"name": "t.xlsx"}, {"name": "t.csv"}, "Save the table as a CSV file", argument="path"
    ),
    "column named twice": Row(
        read_cells,
        {"features": ("a", "a")},
        {"features": ("a",)},
        "Pass the name of each column once",
        argument="features",
    ),
    "target among the features": Row(
        read_cells,
        {"features": ("a", "y")},
        {"features": ("a",)},
        "Remove `y` from `features`.",
        argument="features",
    ),
    "scale of another length": Row(
        read_cells,
        {"mean": [1.0, 2.0, 3.0]},
        {"mean": [0.0, 0.0]},
        "Pass `mean=[0.0, 0.0]` to leave the features unchanged.",
        argument="mean",
    ),
    "decimal comma of a table": Row(
        read_cells,
        with_row("3,1,5,q"),
        with_row('3,1.5,"q,r"'),
        "Write decimal numbers with a point, and put text that has commas in quotation marks",
        argument="data",
    ),
    "decimal comma in quotation marks": Row(
        read_cells, with_row('3,"1,5",q'), with_row("3,1.5,q"), "Write 1.5, with a decimal point.", argument="data"
    ),
    "text in a feature": Row(
        read_cells,
        with_row("3,fast,q"),
        with_row("3,4,q"),
        "Write a number in this cell, or use another column",
        argument="data",
    ),
    "column of durations": Row(
        read_column,
        {"kind": lambda arrow: arrow.duration("s")},
        {"kind": lambda arrow: arrow.int64()},
        "Convert the column to numbers or text",
        InvalidTypeError,
        "data",
    ),
    "columns separated by semicolons": Row(
        read_cells, with_header("a;b;y"), with_header("a,b,y"), "Separate the columns by commas", UnknownNameError
    ),
    "missing column": Row(
        read_cells,
        {"target": "zzz"},
        {"target": "y"},
        "Use the name of a column in the file",
        UnknownNameError,
        "target",
    ),
    "duplicate column": Row(
        read_cells, with_header("a,a,y"), with_header("a,b,y"), "Rename or remove the duplicates", argument="data"
    ),
    "table without rows": Row(
        read_cells, {"text": "a,b,y\n"}, with_header("a,b,y"), "Add a row", MissingValueError, "data"
    ),
    "cell without a value": Row(
        read_cells, with_row("3,,q"), with_row("3,4,q"), "Fill in the value", MissingValueError, "data"
    ),
    "row without a value": Row(
        read_cells,
        with_row("3,,q"),
        {"text": "a,b,y\n1,2,p\n"},
        "or remove the row",
        MissingValueError,
        "data",
    ),
    "targets of more than 64 bits": Row(
        lambda lab, y: index_targets(y, ()),
        {"y": np.zeros(4, np.longdouble)},
        {"y": np.zeros(4, np.longdouble).astype(np.float32)},
        "Convert `y`, for example with `y.astype(np.float32)`",
        InvalidTypeError,
        "y",
    ),
    "duplicate class name": Row(
        lambda lab, names: check_class_names(names),
        {"names": ["p", "p"]},
        {"names": ["p", "q"]},
        "Rename or remove the duplicates",
        argument="classes",
    ),
    "class name that is not Unicode": Row(
        lambda lab, names: check_class_names(names),
        {"names": ["\ud800"]},
        {"names": ["p"]},
        "Rename this entry",
        argument="classes",
    ),
    "unset environment variable": Row(
        lambda lab, key=None: (lab.env.setenv("LAB_KEY", key) if key else None, with_variables({"key": "${LAB_KEY}"})),
        {},
        {"key": "x"},
        "Set the variable: export LAB_KEY=",
        MissingValueError,
        "key",
    ),
    "pipe instead of a file": Row(
        lambda lab, name: (
            (lab.folder / "pipe").exists() or os.mkfifo(lab.folder / "pipe"),
            written(lab, "a.yaml", "a: 1"),
            read_bytes(lab.folder / name),
        ),
        {"name": "pipe"},
        {"name": "a.yaml"},
        "Pass the path of a regular file",
    ),
}


def version():
    from lightning_fcl import __version__

    return __version__


SECONDS = {command, export, export_int8, publish_run, fit_callbacks, fit_clients, fit_clock, fit_words, recipe}
SECONDS |= {run_twice, table_of, table_rows, tune, changed_search}
"""Functions that take at least 0.5 s."""
