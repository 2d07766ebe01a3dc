"""Table of hints in the error messages of networks and tasks."""

from types import SimpleNamespace

import lightning.pytorch as L
import torch
from fixes import Row, fit_reservoir, has_rounds, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier
from lightning_fcl.errors import DamagedFileError, MissingValueError, UnknownNameError
from lightning_fcl.models import MLP, DyTox, EchoStateNetwork, FedWEITNet, Generator, LoRA, create_vit
from lightning_fcl.models._layers import count_patches
from lightning_fcl.models.backbone import frozen_backbone
from lightning_fcl.models.generator import batchnorm_layers
from lightning_fcl.models.quantization import quantize_backbone
from lightning_fcl.models.ridge import RidgeReadout
from lightning_fcl.models.serialization import validate_arguments
from lightning_fcl.models.t2t_cvt import CvTBody
from lightning_fcl.tasks.base import require_embedding_body
from lightning_fcl.tasks.reservoir import ReservoirClassifier
from lightning_fcl.tasks.ridge_statistics import OneHot, RealTargets

ROWS: dict[str, Row] = {}
SECONDS = {
    "name of a vision transformer",
    "quantized backbone with images of another shape",
}


class Net(nn.Module):
    """A network with the submodules `body` and `head`."""

    def __init__(self, first=None):
        super().__init__()
        self.body, self.head = first or nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


def make_dytox(lab, tasks, blocks=None):
    model = DyTox(tasks, 4, image_size=8, patch_size=4, width=8, depth=1, num_heads=2)
    if blocks is not None:
        model.assign_classes(blocks)
    assert sorted(label for block in model.blocks for label in block) == [0, 1, 2, 3]


def begin_tasks(lab, tasks):
    net = FedWEITNet(Net(), tasks)
    for _ in range(2):
        net.start_task(torch.ones(4, dtype=torch.bool))


def make_lora(lab, head):
    net = LoRA(Net(), 2, head=head)
    assert {name for name, value in net.named_parameters() if value.requires_grad} > {"net.head.weight"}


def save_network(lab, name):
    import timm

    path = lab.folder / f"{name}.pt"
    torch.save(timm.create_model(name).state_dict(), path)
    return str(path)


def make_backbone(lab, name="lcnet_035", of="lcnet_035", saves=True):
    network = frozen_backbone(name, save_network(lab, of) if saves else None)
    assert network.embed(torch.rand(1, 3, 32, 32)).isfinite().all()


def quantize(lab, backbone, images=None):
    model = SimpleNamespace(get_submodule=lambda name: backbone)
    quantize_backbone(model, images)
    assert "Int8" in type(model.backbone).__name__


def convolutions(*others):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *others)


def solve_readout(lab, value):
    readout = RidgeReadout(3, 2)
    readout.A.fill_(value)
    readout.solve()
    assert readout.weight.isfinite().all()


def remove_readout(lab, rank):
    readouts = [RidgeReadout(3, 2, rank=rank) for _ in range(2)]
    readouts[0].merge(readouts[1])
    readouts[0].unlearn(readouts[1])
    assert readouts[0].n == 0


def fit_plain_reservoir(lab, beta, validates=False):
    x, y = torch.randn(24, 9, 3), torch.arange(24) % 4
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    task = ReservoirClassifier(EchoStateNetwork(3, units=12, seed=0), 4, beta=beta, min_samples=1)
    trainer = L.Trainer(max_epochs=1, **lab.quiet)
    trainer.fit(task, loader, loader if validates else None)
    return has_rounds(trainer)


def predict(lab, features):
    assert Classifier(MLP([features, 5, 4]), 4, sgd)(torch.randn(2, 6)).shape == (2, 4)


ROWS |= {
    "size of an image whose patches overlap": Row(
        lambda lab, size: count_patches(size, 7, 4, size),
        {"size": 30},
        {"size": 32},
        "Resize the images to a larger multiple of the product of all strides",
    ),
    "patches smaller than their stride": Row(
        lambda lab, kernel: count_patches(32, kernel, 4, 32),
        {"kernel": 3},
        {"kernel": 7},
        "Resize the images to a larger multiple of the product of all strides, or choose patches at least as large as "
        "their stride.",
    ),
    "image size of a hierarchical network": Row(
        lambda lab, size: CvTBody(size, widths=(4, 4, 4), depths=(0, 0, 1), num_heads=(1, 1, 1)),
        {"size": 32},
        {"size": 48},
        "Use larger images, or smaller `strides`.",
    ),
    "name of a vision transformer": Row(
        lambda lab, name: create_vit(name, num_classes=4),
        {"name": "deit_tinny"},
        {"name": "deit_tiny"},
        "Did you mean deit_tiny?",
        UnknownNameError,
    ),
    "option of a vision transformer": Row(
        lambda lab, name: create_vit("vit", num_classes=4, width=8, depth=1, **{name: 2}),
        {"name": "num_head"},
        {"name": "num_heads"},
        "Did you mean num_heads?",
        UnknownNameError,
    ),
    "name of a backbone": Row(
        make_backbone, {"name": "lcnet_35"}, {"name": "lcnet_035"}, "Did you mean lcnet_035?", UnknownNameError
    ),
    "backbone without a file of weights": Row(
        make_backbone,
        {"saves": False},
        {"saves": True},
        "Download the weights from their publisher, and pass the file as `weights`.",
    ),
    "backbone with weights of another network": Row(
        make_backbone,
        {"of": "lcnet_050"},
        {"name": "lcnet_050"},
        "Pass the `name` of the network that the weights belong to.",
        DamagedFileError,
    ),
    "tasks of DyTox that are not those of the stream": Row(
        make_dytox,
        {"tasks": [[0, 1], [2, 3]], "blocks": [[0, 2], [1, 3]]},
        {"tasks": [[0, 2], [1, 3]]},
        "Pass the stream's tasks as `tasks`",
    ),
    "tasks of DyTox that are not those of the stream, by number": Row(
        make_dytox,
        {"tasks": [[0, 1], [2, 3]], "blocks": [[0, 2], [1, 3]]},
        {"tasks": 2},
        "Pass the stream's tasks as `tasks`. If all have the same size, you can pass their number.",
    ),
    "tasks of DyTox with a class twice": Row(
        make_dytox,
        {"tasks": [[0, 1], [1, 2, 3]]},
        {"tasks": [[0, 1], [2, 3]]},
        "Put each class in exactly one task, or change `num_classes`.",
    ),
    "FedWEITNet without tasks": Row(
        lambda lab, tasks: FedWEITNet(Net(), tasks),
        {"tasks": 0},
        {"tasks": 2},
        "Pass the number of experiences of the stream.",
    ),
    "FedWEITNet with few tasks": Row(
        begin_tasks, {"tasks": 1}, {"tasks": 2}, "Pass a larger `num_tasks` to `FedWEITNet`."
    ),
    "FedWEITNet of a network without layers": Row(
        lambda lab, first: FedWEITNet(nn.Sequential(first, nn.ReLU()), 2, "*"),
        {"first": nn.LayerNorm(6)},
        {"first": nn.Linear(6, 5)},
        "Use a network with linear or convolutional layers.",
    ),
    "LoRA with a head that matches nothing": Row(
        make_lora,
        {"head": "classifier.*"},
        {"head": "head.*"},
        'Use a pattern of the last layer, such as `head="head.*"`.',
    ),
    "arguments of a network in a file": Row(
        lambda lab, name: MLP(**validate_arguments(MLP, {name: [6, 5, 4]}, "model")),
        {"name": "size"},
        {"name": "sizes"},
        "Did you mean sizes?",
        UnknownNameError,
    ),
    "reservoir with sequences that are NaN": Row(
        lambda lab, x: EchoStateNetwork(3, units=12, seed=0)(x),
        {"x": torch.full((2, 9, 3), float("nan"))},
        {"x": torch.full((2, 9, 3), float("nan")).nan_to_num()},
        "Correct or drop these sequences.",
    ),
    "quantized backbone with images of another shape": Row(
        quantize,
        {"backbone": convolutions(), "images": torch.rand(2, 1, 8, 8)},
        {"images": torch.rand(2, 3, 8, 8)},
        "Pass a batch of the images that the model is trained on.",
    ),
    "quantized backbone with a layer that stays in floating point": Row(
        quantize,
        {"backbone": convolutions(nn.Flatten()), "images": torch.rand(2, 3, 8, 8)},
        {"backbone": convolutions()},
        "Move unsupported layers to `model.head`, which stays in floating point.",
    ),
    "quantized backbone without convolutions": Row(
        quantize,
        {"backbone": nn.Sequential(), "images": torch.rand(2, 3, 8, 8)},
        {"backbone": convolutions()},
        "Move the model's convolutions to `model.backbone`.",
        MissingValueError,
    ),
    "readout of a rank that forgets": Row(
        remove_readout, {"rank": 2}, {"rank": None}, "Create both readouts without `rank`."
    ),
    "readout of statistics that are NaN": Row(
        solve_readout, {"value": float("nan")}, {"value": 1.0}, "Leave out the clients with such statistics."
    ),
    "generator for a network without batch normalization": Row(
        lambda lab, *layers, **options: batchnorm_layers(nn.Sequential(nn.Conv2d(3, 4, 3), *options.values())),
        {"layer": nn.ReLU()},
        {"layer": nn.BatchNorm2d(4)},
        "Add a layer such as `nn.BatchNorm2d`, or use another method.",
    ),
    "generator of sequences": Row(
        lambda lab, size: Generator(size, width=1),
        {"size": (6, 128)},
        {"size": (6,)},
        "Use a size of three numbers or of one number.",
    ),
    "reservoir in another precision": Row(
        lambda lab, precision: fit_reservoir(lab, strategy={"trainer_args": {"precision": precision}}),
        {"precision": "bf16-mixed"},
        {"precision": "32-true"},
        'Use `precision="32-true"`.',
    ),
    "labels of a floating type": Row(
        lambda lab, y: OneHot(4).encode(y),
        {"y": torch.tensor([0.0, 3.0])},
        {"y": torch.tensor([0.0, 3.0]).long()},
        "Use `y.long()` for labels",
    ),
    "labels of a floating type, as numbers": Row(
        lambda lab, make: make().encode(torch.tensor([[0.0], [3.0]])),
        {"make": lambda: OneHot(4)},
        {"make": lambda: RealTargets(1)},
        "Use `y.long()` for labels, or a regression task for numbers.",
    ),
    "labels above the number of classes": Row(
        lambda lab, classes: OneHot(classes).encode(torch.tensor([0, 3])),
        {"classes": 3},
        {"classes": 4},
        "Number the labels from 0, and set `num_classes` to the data's number of classes.",
    ),
    "targets of a reservoir of another size": Row(
        lambda lab, outputs: RealTargets(outputs).encode(torch.zeros(4, 2)),
        {"outputs": 1},
        {"outputs": 2},
        "Set `num_outputs` to the target's size.",
    ),
    "targets of a reservoir that are NaN": Row(
        lambda lab, y: RealTargets(1).encode(y),
        {"y": torch.full((2, 1), float("nan"))},
        {"y": torch.zeros(2, 1)},
        "Correct or drop the sequences with such targets.",
    ),
    "plain fit of a reservoir with several beta": Row(
        fit_plain_reservoir,
        {"beta": [0.1, 1.0]},
        {"validates": True},
        "Pass `val_dataloaders` to `fit`, or one `beta`.",
    ),
    "plain fit of a reservoir with several beta, with one": Row(
        fit_plain_reservoir, {"beta": [0.1, 1.0]}, {"beta": 0.1}, "Pass `val_dataloaders` to `fit`, or one `beta`."
    ),
    "network without features": Row(
        lambda lab, model: require_embedding_body(model()),
        {"model": Net},
        {"model": lambda: MLP([6, 5, 4])},
        "Use a network of `lightning_fcl.models`, or define `embed` and `features`.",
    ),
    "network for other samples": Row(
        predict, {"features": 5}, {"features": 6}, "Change the arguments of `model` to match the data"
    ),
}
