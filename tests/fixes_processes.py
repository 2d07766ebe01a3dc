"""Table of hints in error messages about checkpoints, stored states and several processes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as L
import torch
from fixes import Row, fit_one_round, has_rounds, sgd, small_stream
from fixes_federation import keep, read_speeds
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed import HashStore

from lightning_fcl import Classifier, ClientSpeeds, FedBuff, FederatedStream, Swarm
from lightning_fcl.callbacks import FOT
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Delayed, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import DamagedFileError, MissingValueError
from lightning_fcl.federation.aggregation import Aggregator
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.ranks import SINGLE_RANK
from lightning_fcl.federation.reductions import Mean, Reduction
from lightning_fcl.methods.method import sample_shape
from lightning_fcl.simulation.gloo import GlooRanks
from lightning_fcl.simulation.multiprocess import check_same_federation
from lightning_fcl.simulation.setup_checks import check_ranks

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


def call_together(calls):
    """Call functions in parallel. Each function gets the `GlooRanks` of a different rank."""
    store = HashStore()
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [
            pool.submit(lambda rank, call: call(GlooRanks(store, rank, len(calls))), rank, call)
            for rank, call in enumerate(calls)
        ]
        return [one.result() for one in running]


class Alone(Reduction):
    """A reduction whose accumulator does not support several processes."""

    name = "alone"

    def make_accumulator(self):
        return SimpleNamespace(update=lambda values, weights: None, compute=dict)


def aggregate(lab, reduction, processes=2):
    def combine(ranks):
        aggregator = Aggregator({"w": reduction})
        aggregator.accumulate({"w": torch.ones(1, 2)}, [1.0], [ranks.rank])
        if ranks.num_ranks > 1:
            aggregator.sync(ranks)
        return aggregator.num_uploads

    found = call_together([combine] * processes) if processes > 1 else [combine(SINGLE_RANK)]
    assert found == [processes] * processes


def compare(lab, recipes):
    call_together([lambda ranks, one=recipe: check_same_federation(ranks, {"recipe": one}) for recipe in recipes])


def count_processes(lab, processes, **options):
    trainer = fit_one_round(lab, **options)
    check_ranks(trainer.strategy.federation, processes)


def read_client(lab, resumes):
    state = {"model": {"w": torch.arange(4.0)}}
    store = ClientStore("disk", lab.folder / "clients")
    store["a"] = state
    (path,) = (lab.folder / "clients").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    if resumes:
        store.replace_all({"a": state})
    assert torch.equal(store["a"]["model"]["w"], state["model"]["w"])


class Saves(L.Callback):
    """A callback that saves a checkpoint in a given hook."""

    def __init__(self, hook, path):
        setattr(self, hook, lambda trainer, *args: trainer.save_checkpoint(path))


def resume_saved(lab, hook):
    path = lab.folder / f"{hook}.ckpt"
    lab.fit(lab.task(), lab.stream(), [Saves(hook, path)], max_epochs=1)
    has_rounds(lab.fit(lab.task(), lab.stream(), ckpt_path=path), 2)


def resume_server(lab, change, starts_again=False):
    """Resume an asynchronous fit from a checkpoint in which ``change`` has changed the federation's state.

    If ``starts_again`` is true, start a new fit instead.
    """
    folder = lab.folder / str(len([*lab.folder.iterdir()]))
    options = {"synchronization": FedBuff(ClientSpeeds(0.1, spread=0.9), 1), "max_vectorized_clients": 1}
    saving = {"trainer_args": {"enable_checkpointing": True}}
    checkpoints = ModelCheckpoint(folder, save_last=True)
    lab.fit(lab.task(), lab.stream(), [checkpoints], max_epochs=1, **saving, **options)
    path = folder / "last.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    (federation,) = (kept for kept in checkpoint["callbacks"].values() if "between_rounds" in kept)
    change(federation)
    torch.save(checkpoint, path)
    has_rounds(lab.fit(lab.task(), lab.stream(), ckpt_path=None if starts_again else path, **options), 2)


def drop_clock(kept):
    kept["asynchronous"] = None


def drop_clients(kept):
    kept["clients"] = [1]


def cut_versions(kept):
    for state in kept["asynchronous"]["versions"].values():
        state.update({name: value[:1] for name, value in state.items()})


def fit_until(lab, rounds):
    """Fit a stream whose last round has no clients."""
    stream = small_stream(scenario=Stationary(3), split=Split(test=0.0))
    stream.setup("fit")
    stream.plan = replace(stream.plan, train=(*stream.plan.train[:2], {}))
    schedule = FedBuff(ClientSpeeds(1.0), 2)
    has_rounds(lab.fit(lab.task(), stream, synchronization=schedule, max_epochs=rounds), rounds)


class Prepared(Classifier):
    """A module whose forward pass fails before the first round, so that the library cannot run a batch in advance."""

    def on_train_epoch_start(self):
        self.scale = 1.0

    def forward(self, x):
        return self.scale * super().forward(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def fit_single(lab, num_clients=2, batch_size=6):
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    x, y = torch.randn(12, 6), torch.arange(12) % 4
    stream = FederatedStream.from_arrays(
        x, y, scenario=Stationary(), partition=IID(num_clients), split=Split(test=0.0), batch_size=batch_size
    )
    return fit_one_round(lab, stream, Prepared(net, 4, sgd))


def find_size(lab, simulates):
    stream = small_stream()
    stream.setup("fit")
    if not simulates:
        stream.plan = replace(stream.plan, train=())
    assert sample_shape(SimpleNamespace(stream=stream), "GLFC") == (6,)


def fit_sums(lab, scenario, participation=0.5, **settings):
    return fit_one_round(
        lab, small_stream(scenario=scenario), callbacks=[FOT()], participation=participation, **settings
    )


LATE = Delayed(ClassIncremental(2, 2), max_delay=2)
SINGLE = "Use a `batch_size` that leaves no single sample, and a partition that gives each client at least two samples."
SUMS = "Use `participation=1.0`, or use a scenario in which all clients enter each experience in the same round."

ROWS |= {
    "reduction of one process": Row(
        aggregate,
        {"reduction": Alone()},
        {"reduction": Mean()},
        "Define `sync` in the accumulator, or train with `devices=1` and `num_nodes=1`.",
    ),
    "reduction of one process, on one device": Row(
        aggregate,
        {"reduction": Alone()},
        {"processes": 1},
        "Define `sync` in the accumulator, or train with `devices=1` and `num_nodes=1`.",
    ),
    "processes with other recipes": Row(
        compare,
        {"recipes": ["a", "b"]},
        {"recipes": ["a", "a"]},
        "Start all processes with the same recipe, data and package versions.",
    ),
    "processes without clients": Row(
        count_processes, {"processes": 4, "max_vectorized_clients": 1}, {"processes": 3}, "Set fewer `devices`."
    ),
    "processes without vectorized training": Row(
        count_processes,
        {"processes": 3, "max_vectorized_clients": 2},
        {"max_vectorized_clients": 1},
        "Set fewer `devices`, or set `max_vectorized_clients` below 2, which changes results only by rounding.",
    ),
    "state of a client that is damaged": Row(
        read_client,
        {"resumes": False},
        {"resumes": True},
        "Resume from the newest checkpoint, which contains the states of all clients.",
        DamagedFileError,
    ),
    "checkpoint within a round": Row(
        resume_saved,
        {"hook": "on_train_batch_end"},
        {"hook": "on_train_epoch_end"},
        "Use a checkpoint that was saved at the end of a round, for example by `ModelCheckpoint(every_n_epochs=1)`.",
    ),
    "checkpoint without the states of clients": Row(
        resume_server, {"change": drop_clients}, {"change": keep}, "Resume from another checkpoint."
    ),
    "checkpoint without the clock of a server": Row(
        resume_server, {"change": drop_clock}, {"change": keep}, "Resume from another checkpoint."
    ),
    "checkpoint with a download of another shape": Row(
        resume_server, {"change": cut_versions}, {"starts_again": True}, "Start without `ckpt_path`."
    ),
    "round without clients": Row(fit_until, {"rounds": 3}, {"rounds": 2}, "Lower `max_epochs`."),
    "file of speeds that is not CSV": Row(
        read_speeds,
        {"text": 'client,seconds_per_sample\n0,"' + "0" * 200_000},
        {"text": "client,seconds_per_sample\n0,0.1\n"},
        "Save the file as CSV in UTF-8, and pass its path.",
    ),
    "batch of one sample": Row(fit_single, {"batch_size": 5}, {"batch_size": 6}, SINGLE),
    "client of one sample": Row(fit_single, {"num_clients": 12}, {"num_clients": 2}, SINGLE),
    "size of samples in a deployment": Row(
        find_size,
        {"simulates": False},
        {"simulates": True},
        "Simulate the federation, or do not use `GLFC`.",
        MissingValueError,
    ),
    "sums of clients in other experiences": Row(fit_sums, {"scenario": LATE}, {"participation": 1.0}, SUMS),
    "sums of clients in other experiences, same round": Row(
        fit_sums, {"scenario": LATE}, {"scenario": ClassIncremental(2, 2)}, SUMS
    ),
    "sums of clients in other experiences, in a swarm": Row(
        fit_sums,
        {"scenario": LATE, "participation": 1.0, "swarm": Swarm()},
        {"swarm": None},
        SUMS.replace("Use `participation=1.0`", "Remove `swarm`"),
    ),
}
