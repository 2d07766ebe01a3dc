"""Table of hints in the error messages of methods, callbacks and local training."""

import lightning.pytorch as L
import torch
from fixes import (
    DyToxMethod,
    Items,
    Row,
    TakesAny,
    fit_dytox,
    fit_one_round,
    has_rounds,
    of_dict,
    of_pair,
    pairs,
    sgd,
    small_stream,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_fcl import Classifier
from lightning_fcl.callbacks import (
    MFCL,
    TARGET,
    Fed3R,
    FedProx,
    ReFed,
    Replay,
)
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidStateError, InvalidTypeError
from lightning_fcl.local_training.gradient_accumulation import count_client_batches
from lightning_fcl.methods.compose import check_compatible, check_needs
from lightning_fcl.methods.dytox import _task_of
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.intrinsic_plasticity import IntrinsicPlasticity
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.per_sample_gradients import module_per_sample_gradients
from lightning_fcl.models import MLP, DyTox

ROWS: dict[str, Row] = {}
SECONDS: set[str] = {
    "DyTox as a part of no module",
    "Re-Fed with a high learning rate",
    "count_client_batches between rounds",
    "strategy of Avalanche that asks for the training loop",
}


def mlp():
    return Classifier(MLP([6, 5, 4]), 4, sgd)


def fit_plain(lab, callbacks, data=None, task=None):
    loader = DataLoader(data or pairs(), batch_size=6)
    trainer = L.Trainer(max_epochs=1, callbacks=callbacks, **lab.quiet)
    trainer.fit(task or mlp(), loader)
    return has_rounds(trainer)


class TwoEpochs(Method):
    def local_epochs(self, client):
        return 2


class Personal(Method):
    def personalize(self, client, state):
        return state


def fit_local_epochs(lab, stream):
    if not stream:
        return fit_plain(lab, [TwoEpochs()])
    return fit_personal(lab, "auto", method=TwoEpochs())


def fit_personal(lab, strategy, has_method=True, method=None):
    stream, methods = small_stream(client_ids=[0] * 48), [method or Personal()] if has_method else []
    trainer = L.Trainer(strategy=strategy, max_epochs=1, callbacks=methods, **lab.quiet)
    trainer.fit(mlp(), datamodule=stream)
    return has_rounds(trainer)


def policies():
    from avalanche.training import storage_policy

    return storage_policy


def fit_avalanche(lab, curious):
    storage = policies()

    class Curious(storage.ExemplarsSelectionStrategy):
        def make_sorted_indices(self, strategy, data):
            return strategy.experience

    task = mlp()
    strategy = Curious() if curious else storage.HerdingSelectionStrategy(task.model, "1")
    return fit_one_round(lab, task=task, callbacks=[Replay(buffer=storage.ParametricBuffer(4, "class", strategy))])


def replay_with_buffer(lab, own=False, **options):
    storage = policies()

    class Own(storage.ReservoirSamplingBuffer):
        pass

    return Replay(buffer=(Own if own else storage.ReservoirSamplingBuffer)(3), **options)


def check_precision(lab, precision):
    plugins = [MixedPrecision(precision, "cuda" if precision.startswith("16") else "cpu")]
    trainer = L.Trainer(plugins=plugins, **lab.quiet)
    check_needs(FedProx(0.1), trainer, mlp())


def use_client(lab, fits):
    method, clients = FedProx(0.1), []

    class Asks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            clients.append(method.client)

    if fits:
        fit_one_round(lab, callbacks=[method, Asks()])
    assert (clients or [method.client])[0] is not None


class AsksSteps(L.Callback):
    """A callback that calls `count_client_batches` in a given hook."""

    def __init__(self, hook):
        self.counts = []
        setattr(self, hook, lambda trainer, *args: self.counts.append(count_client_batches(trainer)))


def ask_steps(lab, hook):
    callback = AsksSteps(hook)
    fit_one_round(lab, callbacks=[callback])
    assert min(callback.counts) > 0


class Pair(Classifier):
    """A classifier that returns logits and inputs, or only logits."""

    alone = False

    def forward(self, x):
        logits = super().forward(x)
        return logits if self.alone else (logits, x)


def sample_gradients(lab, alone):
    task = Pair(MLP([6, 5, 4]), 4, sgd)
    task.alone = alone
    state = dict(task.named_parameters())
    x, y = next(iter(DataLoader(pairs(4), batch_size=4)))

    def objective(output, y):
        return cross_entropy(output, y, reduction="sum")

    found = [*module_per_sample_gradients(task, objective, state, x, y, ["model.1.weight"])]
    assert found


def fit_generator(lab, shape=(6,), method=TARGET, **options):
    task = Classifier(MLP([6, 5, 4], batch_norm=True), 4, sgd)
    return fit_one_round(lab, small_stream(x=torch.randn(48, *shape)), task, callbacks=[method(**options)])


def fit_fed3r(lab, bias):
    model = MLP([6, 5, 4])
    model[-1] = nn.Linear(5, 4, bias=bias)
    return fit_one_round(lab, task=Classifier(model, 4, sgd), callbacks=[Fed3R()])


ROWS |= {
    "strategy of Avalanche that asks for the training loop": Row(
        fit_avalanche,
        {"curious": True},
        {"curious": False},
        "Use a strategy that needs only the model, such as `HerdingSelectionStrategy`.",
        InvalidTypeError,
    ),
    "buffer of a subclass": Row(
        replay_with_buffer, {"own": True}, {"own": False}, "Use an object of one of these classes.", InvalidTypeError
    ),
    "buffer with repeat": Row(
        replay_with_buffer, {"oversample": True}, {"oversample": False}, "Leave `oversample` out, or leave `buffer` out"
    ),
    "method twice": Row(
        lambda lab, methods: check_compatible(methods),
        {"methods": [FedProx(0.1), FedProx(0.2)]},
        {"methods": [FedProx(0.1)]},
        "Keep one `FedProx`, and remove the others.",
    ),
    "loss scaling with a method": Row(
        check_precision, {"precision": "16-mixed"}, {"precision": "bf16-mixed"}, 'Use "bf16-mixed" or "32-true".'
    ),
    "client of a method outside a fit": Row(
        use_client,
        {"fits": False},
        {"fits": True},
        "Read `client` only in batch hooks of sequential training",
        InvalidStateError,
    ),
    "DyTox as a part of no module": Row(
        lambda lab, dytox: fit_dytox(lab, ClassIncremental(2)) if dytox else fit_with_dytox(lab),
        {"dytox": False},
        {"dytox": True},
        "Use `Classifier(model=DyTox(...))`.",
    ),
    "experience with classes of two tasks of DyTox": Row(
        lambda lab, tasks: _task_of(
            DyTox(tasks, 4, image_size=8, patch_size=4, width=8, depth=1, num_heads=2), torch.tensor([0, 2]), "a"
        ),
        {"tasks": [[0, 1], [2, 3]]},
        {"tasks": [[0, 2], [1, 3]]},
        "Give `DyTox(tasks=...)` the classes of each experience.",
    ),
    "replay samples that are dicts": Row(
        lambda lab, data: finite_pairs(data),
        {"data": {"x": torch.zeros(2, 6), "y": torch.zeros(2)}},
        {"data": [torch.zeros(2, 6), torch.zeros(2)]},
        "Return `[x, y]` pairs from the dataset.",
        InvalidTypeError,
    ),
    "Fed3R with repeated samples": Row(
        lambda lab, **history: fit_one_round(
            lab, small_stream(scenario=ClassIncremental(2, **history)), mlp(), callbacks=[Fed3R()]
        ),
        {"history": "seen"},
        None,
        "Leave `history` out of the scenario's arguments.",
    ),
    "module without a last layer": Row(
        fit_fed3r,
        {"bias": False},
        {"bias": True},
        "Use a `Classifier` with such a network.",
    ),
    "share of replay samples in a plain Trainer": Row(
        lambda lab, size: fit_plain(lab, [Replay(size)]),
        {"size": 0.5},
        {"size": 200},
        "Pass a whole number, such as `memory_size=200`.",
    ),
    "local epochs on loaders of a plain Trainer": Row(
        lambda lab, **data: fit_local_epochs(lab, **data),
        {"stream": False},
        {"stream": True},
        "Pass the data as a `FederatedStream`",
    ),
    "method of client models in a plain Trainer": Row(
        lambda lab, strategy: fit_personal(lab, strategy),
        {"strategy": "auto"},
        {"strategy": "federated"},
        'Use `strategy="federated"`',
    ),
    "method of client models in a plain Trainer, without it": Row(
        lambda lab, **methods: fit_personal(lab, "auto", **methods),
        {"has_method": True},
        {"has_method": False},
        "or remove",
    ),
    "replay of dicts in a plain Trainer": Row(
        lambda lab, make: fit_dicts(lab, make),
        {"make": of_dict},
        {"make": of_pair},
        "Return a pair from your dataset, and use the default collate function.",
        InvalidTypeError,
    ),
    "gradients of samples of a module that returns a tuple": Row(
        sample_gradients, {"alone": False}, {"alone": True}, "Return the logits alone.", InvalidTypeError
    ),
    "TARGET with sequences": Row(
        fit_generator,
        {"shape": (2, 3)},
        {"shape": (6,)},
        "Use a dataset of images or feature vectors, or another method.",
    ),
    "MFCL with less noise than classes": Row(
        lambda lab, **options: fit_generator(lab, method=MFCL, **options),
        {"noise_dim": 3},
        {"noise_dim": 4},
        "Increase `noise_dim`, because the first numbers of the noise are the scores of the classes.",
    ),
    "Re-Fed with a high learning rate": Row(
        lambda lab, rate: fit_one_round(lab, callbacks=[ReFed(8, lr=rate)]),
        {"rate": 1e30},
        {"rate": 0.01},
        "Lower `lr`.",
    ),
    "plasticity that diverges": Row(
        lambda lab, **options: IntrinsicPlasticity(eta=1e38, **options).step(*torch.full((4, 1, 3), 1e38)),
        {"normalize_grad": False},
        {"normalize_grad": True},
        "Lower `eta`, raise `sigma`, or set `normalize_grad=True`.",
    ),
    "count_client_batches between rounds": Row(
        ask_steps,
        {"hook": "on_train_epoch_start"},
        {"hook": "on_train_batch_start"},
        "Call the function in a training step, or in the hooks of a batch.",
    ),
}


def fit_with_dytox(lab):
    return fit_one_round(lab, callbacks=[DyToxMethod(memory_size=4)])


def fit_dicts(lab, make):
    return fit_plain(lab, [Replay(8)], Items(make), TakesAny(MLP([6, 5, 4]), 4, sgd))
