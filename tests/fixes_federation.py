"""Table of hints in the error messages of the federation, the simulation and the conformance suite."""

import lightning.pytorch as L
import torch
from fixes import Row, fit_one_round, has_rounds, pairs, sgd
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_fcl import Classifier, ClientSpeeds, Deadline, FederatedStream
from lightning_fcl.callbacks import FedProx
from lightning_fcl.conformance.suite import get_classes, get_statements
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.federation.aggregation import check_state, state_tensors
from lightning_fcl.federation.robust import check_update_norm
from lightning_fcl.federation.server_optimizer import optimizer_state
from lightning_fcl.models import MLP
from lightning_fcl.simulation.multiprocess import check_processes

ROWS: dict[str, Row] = {}
SECONDS: set[str] = {
    "checkpoint of an old version of Lightning",
    "checkpoint of another epoch",
    "checkpoint without a training loop",
    "checkpoint without loops",
    "file of speeds without clients",
}


class Extra(nn.Module):
    """A module that stores a number in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(3))


class ExtraState(Extra):
    """A module that stores a number as extra state."""

    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        pass


def check(lab, state, sizes=(6, 5, 4)):
    torch.manual_seed(0)
    check_state(MLP([*sizes]), state)


def state_of(*sizes, **changes):
    return {**MLP([*sizes]).state_dict(), **changes}


def read_speeds(lab, text, name="speeds.csv"):
    path = lab.folder / name
    path.write_text(text)
    speeds = ClientSpeeds(1.0, path=path)
    return fit_one_round(lab, synchronization=Deadline(speeds))


class KeepsText(torch.optim.SGD):
    """An optimizer whose state contains text."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["note"] = "text"
        return loss


def remember(lab, kind):
    layer = nn.Linear(2, 1)
    optimizer = kind(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer_state(optimizer)


def move(lab, most):
    before = {"weight": torch.ones(4)}
    check_update_norm(before, {"weight": torch.full((4,), 100.0)}, ["weight"], most)


def fit_module_reloaded(lab, **options):
    data = L.LightningDataModule.from_datasets(pairs(), test_dataset=pairs(8), batch_size=8)
    stream = FederatedStream(data, Stationary(), partition=IID(2))
    return has_rounds(lab.fit(Classifier(MLP([6, 5, 4]), 4, sgd), stream, max_epochs=1, trainer_args=options))


def resume(lab, change):
    saving = {"enable_checkpointing": True}
    folder = lab.folder / str(len([*lab.folder.iterdir()]))
    lab.fit(lab.task(), lab.stream(), [ModelCheckpoint(folder, save_last=True)], max_epochs=1, trainer_args=saving)
    path = folder / "last.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, path)
    has_rounds(lab.fit(lab.task(), lab.stream(), ckpt_path=path), 2)


def keep(checkpoint):
    pass


def change_version(checkpoint):
    checkpoint["pytorch-lightning_version"] = "1.9.5"


def change_epoch(checkpoint):
    checkpoint["epoch"] = 7


def drop_loops(checkpoint):
    checkpoint["loops"] = None


def drop_fit_loop(checkpoint):
    checkpoint["loops"]["fit_loop"] = {}


def check_machines(lab, nodes=1, processes=1):
    check_processes(LightningEnvironment(), processes, nodes)


class Claims(FedProx):
    """A method whose `implements` names an unknown method."""

    implements = ("FedProxx",)


class ClaimsRight(FedProx):
    """A method whose `implements` names FedProx."""

    implements = ("FedProx",)


ROWS |= {
    "module with extra state": Row(
        lambda lab, kind: state_tensors(kind()),
        {"kind": ExtraState},
        {"kind": Extra},
        "Store the value in a buffer, with `register_buffer`.",
    ),
    "state of a module with other layers": Row(
        check,
        {"state": state_of(6, 5, 4), "sizes": (6, 5, 5, 4)},
        {"sizes": (6, 5, 4)},
        "Build the module with the arguments that were used when the state was saved.",
    ),
    "state of a module of another size": Row(
        check,
        {"state": state_of(6, 3, 4)},
        {"sizes": (6, 3, 4)},
        "Build the module with the arguments that were used when the state was saved.",
    ),
    "state with text": Row(
        check,
        {"state": state_of(6, 5, 4, **{"1.weight": "text"})},
        {"state": state_of(6, 5, 4)},
        "Use a state of tensors, as `module.state_dict()` returns.",
    ),
    "state that is NaN": Row(
        check,
        {"state": state_of(6, 5, 4, **{"1.weight": torch.full((5, 6), float("nan"))})},
        {"state": state_of(6, 5, 4)},
        "Use the state of an earlier round.",
    ),
    "optimizer with text in its state": Row(
        remember, {"kind": KeepsText}, {"kind": torch.optim.SGD}, "Remove `keep_optimizer_state`."
    ),
    "round with a large update": Row(
        move, {"most": 10.0}, {"most": 1000.0}, "or a larger `max-update-norm` in the run's configuration."
    ),
    "file of speeds without clients": Row(
        read_speeds,
        {"text": "name,seconds_per_sample\n0,0.1\n"},
        {"text": "client,seconds_per_sample\n0,0.1\n"},
        "Add a header with the column `client`, and give each row one cell per column.",
    ),
    "file of speeds with a client twice": Row(
        read_speeds,
        {"text": "client,seconds_per_sample\n0,0.1\n0,0.2\n"},
        {"text": "client,seconds_per_sample\n0,0.1\n"},
        "Remove the duplicate rows.",
    ),
    "loaders that are reloaded": Row(
        fit_module_reloaded,
        {"reload_dataloaders_every_n_epochs": 1},
        None,
        "Remove the argument. If samples change between rounds, pass their `group`",
    ),
    "checkpoint of an old version of Lightning": Row(
        resume, {"change": change_version}, {"change": keep}, "Save the checkpoint again with `lightning` 2."
    ),
    "checkpoint of another epoch": Row(
        resume, {"change": change_epoch}, {"change": keep}, "Resume from another checkpoint."
    ),
    "checkpoint without loops": Row(
        resume, {"change": drop_loops}, {"change": keep}, "Resume from another checkpoint."
    ),
    "checkpoint without a training loop": Row(
        resume, {"change": drop_fit_loop}, {"change": keep}, "Resume from another checkpoint."
    ),
    "processes of a machine": Row(
        check_machines, {"processes": 10**6}, {"processes": 2}, "Set `devices` to the number of CPU cores or less."
    ),
    "machines without an address": Row(
        check_machines,
        {"nodes": 2},
        {"nodes": 1},
        "Set the missing variables as described in docs/scale.md, or remove `num_nodes`.",
    ),
    "claim of a method": Row(
        lambda lab, kind: get_statements(kind),
        {"kind": Claims},
        {"kind": ClaimsRight},
        "Did you mean FedProx?",
        UnknownNameError,
    ),
    "method of the conformance suite": Row(
        lambda lab, name: get_classes(name), {"name": "FedPrx"}, {"name": "FedProx"}, "Did you mean", UnknownNameError
    ),
}
