"""Tests with data and modules of third-party libraries. Federated training equals hand-written FedAvg."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, Replay
from lightning_fcl.data.batching import BatchRequest
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.models import MLP

from .steps import Steps

BATCH = 4


@dataclass
class Library:
    """A module of a library, and its data.

    Args:
        module: The module.
        data: Function that returns the data set of a client, given the client's index.
        loader: Function that returns the library's own loader of a data set.
        options: Arguments of the stream that replace settings of the loader.
        wrap: Function that converts a client's data set to the object that the stream gets.
    """

    module: L.LightningModule
    data: Callable[[int], Any]
    loader: Callable[[Any], DataLoader]
    options: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = lambda data: data

    def stream(self, clients: int, rounds: int) -> FederatedStream:
        own = [self.wrap(self.data(client)) for client in range(clients)]
        split = Split(test=0.0)
        return FederatedStream(own, Stationary(rounds), split=split, batch_size=BATCH, shuffle=False, **self.options)


def digits(client: int, samples: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return images of shape (n, 8, 8) with values from 0 to 1, and labels. Clients have different samples."""
    images, labels = load_digits(return_X_y=True)
    rows = slice(samples * client, samples * (client + 1))
    return images[rows].reshape(-1, 8, 8).astype(np.float32) / 16, labels[rows]


def monai() -> Library:
    """Return a U-Net that segments digits, and its data in batches of `MetaTensor`."""
    from monai.data import CacheDataset, DataLoader, list_data_collate
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from monai.transforms import Compose, EnsureChannelFirstd, EnsureTyped, NormalizeIntensityd, RandFlipd

    def data(client: int) -> CacheDataset:
        keys = ["image", "mask"]
        transform = Compose(
            [
                EnsureChannelFirstd(keys, channel_dim="no_channel"),
                NormalizeIntensityd("image"),
                EnsureTyped(keys),
                RandFlipd(keys, prob=1.0, spatial_axis=1),
            ]
        )
        items = [{"image": image, "mask": image > 0.5} for image in digits(client)[0]]
        return CacheDataset(items, transform, progress=False)

    criterion = DiceCELoss(sigmoid=True)
    module = Steps(
        UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,)),
        lambda network, batch: criterion(network(batch["image"]), batch["mask"].float()),
    )
    return Library(module, data, lambda own: DataLoader(own, batch_size=BATCH), {"collate_fn": list_data_collate})


def hugging_face() -> Library:
    """Return a classifier of mean word vectors and its data.

    Sentences are padded to the longest sentence of their batch.
    """
    import datasets

    def pad(batch: dict[str, list]) -> dict[str, torch.Tensor]:
        words = [torch.tensor(words) for words in batch["words"]]
        return {"words": nn.utils.rnn.pad_sequence(words, batch_first=True), "label": torch.tensor(batch["label"])}

    def data(client: int) -> datasets.Dataset:
        rng = np.random.default_rng(client)
        words = [rng.integers(1, 20, size=2 + (7 * i) % 5).tolist() for i in range(10)]
        return datasets.Dataset.from_dict({"words": words, "label": [i % 3 for i in range(10)]}).with_transform(pad)

    class MeanOfWords(nn.Module):
        """A network that averages over words and padding. A different length of the padding changes the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(words).mean(dim=1))

    module = Steps(MeanOfWords(), lambda network, batch: F.cross_entropy(network(batch["words"]), batch["label"]))
    return Library(module, data, lambda own: DataLoader(own, BATCH))


class AugmentedDigits(Dataset):
    """Digits of a client. An albumentations transform changes each digit."""

    def __init__(self, client: int, transform: Callable[..., dict[str, Any]]) -> None:
        self.images, self.labels = digits(client)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(image=self.images[index][..., None])["image"], int(self.labels[index])


def albumentations() -> Library:
    import albumentations as A

    transform = A.Compose(
        [A.Affine(rotate=(30, 30), p=1.0), A.HorizontalFlip(p=1.0), A.Normalize(0.3, 0.4, 1.0), A.ToTensorV2()]
    )
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    module = Steps(network, lambda network, batch: F.cross_entropy(network(batch[0]), batch[1]))
    return Library(module, lambda client: AugmentedDigits(client, transform), lambda own: DataLoader(own, BATCH))


def graphs(client: int, samples: int = 10) -> Any:
    """Return an `InMemoryDataset` of cycle graphs of several sizes. The node features depend on the class."""
    from torch_geometric.data import Data, InMemoryDataset

    class Circles(InMemoryDataset):
        def __init__(self) -> None:
            super().__init__()
            draw, items = torch.Generator().manual_seed(client), []
            for number in range(samples):
                node, label = torch.arange(3 + number % 4), number % 3
                x = torch.randn(len(node), 5, generator=draw) + 2 * F.one_hot(torch.tensor(label), 5)
                edges = torch.stack([node, (node + 1) % len(node)])
                items.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.tensor([label])))
            self.data, self.slices = self.collate(items)

    return Circles()


class GraphClassifier(nn.Module):
    """Two graph convolutions and a mean over the nodes of each graph."""

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second, self.head = GCNConv(5, 8), GCNConv(8, 8), nn.Linear(8, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.head(global_mean_pool(x, batch.batch))


def graph_loss(network: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(network(batch), batch.y)


def torch_geometric() -> Library:
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader

    options = {"collate_fn": Batch.from_data_list}
    return Library(Steps(GraphClassifier(), graph_loss), graphs, lambda own: DataLoader(own, BATCH), options)


def torch_geometric_data_module() -> Library:
    """Return graphs as a `LightningDataset` for each client. The loaders of this data module define the batches."""
    from torch_geometric.data.lightning import LightningDataset

    return replace(torch_geometric(), options={}, wrap=lambda data: LightningDataset(data, batch_size=BATCH))


class Images(Dataset):
    """Digits of a client as anomalib items. If ``anomalous`` is true, the second half of the items is anomalous."""

    def __init__(self, client: int, anomalous: bool = False) -> None:
        self.images = torch.from_numpy(digits(client)[0])[:, None].repeat(1, 3, 1, 1)
        self.anomalous = anomalous

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        from anomalib.data import ImageItem

        label = self.anomalous and index >= len(self) // 2
        image = 1 - self.images[index] if label else self.images[index]
        return ImageItem(image=image, gt_label=torch.tensor(label), image_path=f"{index}.png")


def anomalib(**arguments: Any) -> Library:
    """Return GANomaly and its data.

    GANomaly uses two optimizers, batch normalization, and a callback that resizes each batch.
    """
    from anomalib.data import ImageBatch
    from anomalib.metrics import AUROC, Evaluator
    from anomalib.models import Ganomaly
    from anomalib.pre_processing import PreProcessor
    from torchvision.transforms import v2

    metrics = Evaluator(test_metrics=[AUROC(fields=["pred_score", "gt_label"], prefix="image_")])
    resize = PreProcessor(v2.Resize((32, 32)))
    sizes = {"batch_size": BATCH, "n_features": 8, "latent_vec_size": 10}
    module = Ganomaly(**sizes, pre_processor=resize, evaluator=metrics, visualizer=False, **arguments)
    loader = lambda own: DataLoader(own, BATCH, collate_fn=ImageBatch.collate)  # noqa: E731
    return Library(module, Images, loader, {"collate_fn": ImageBatch.collate})


LIBRARIES = (monai, hugging_face, albumentations, torch_geometric, torch_geometric_data_module, anomalib)


@pytest.mark.may(
    "Batches of `MetaTensor` objects, graphs or dataclasses, and batches that are padded to the longest sample",
    "Clients train on the batches that the loader of the third-party library returns.",
)
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("make", LIBRARIES, ids=lambda make: make.__name__)
def test_federation_on_library_data_equals_plain_trainers(make, clients, federated, by_hand, assert_alike):
    library, rounds = make(), 2
    module = copy.deepcopy(library.module)
    federated(module, library.stream(clients, rounds))
    data = [library.data(client) for client in range(clients)]
    after = by_hand(library.module, [(len(own), library.loader(own)) for own in data], rounds)
    before = library.module.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert_alike(module, after)


def splits_of_images(client: int) -> dict[str, Images]:
    """Return training, validation and test images. Half of the validation and test images are anomalous."""
    return {"train": Images(client), "validation": Images(10 + client, True), "test": Images(20 + client, True)}


def test_anomalib_thresholds_and_metrics_equal_plain_trainer(federated, by_hand, assert_alike, trainer_of):
    """The post-processor sets thresholds on the validation samples, and the evaluator computes the test metrics."""
    library, rounds, clients = anomalib(), 2, [splits_of_images(client) for client in range(2)]
    stream = FederatedStream(clients, Stationary(rounds), batch_size=BATCH, shuffle=False, **library.options)
    module, expected = copy.deepcopy(library.module), library.module
    trainer = federated(module, stream)

    trained = [(len(own["train"]), library.loader(own["train"])) for own in clients]
    expected.load_state_dict(by_hand(expected, trained, rounds))
    alone, joined = trainer_of(), {part: ConcatDataset([own[part] for own in clients]) for part in clients[0]}
    alone.validate(expected, library.loader(joined["validation"]), verbose=False)
    assert expected.post_processor.image_min.isfinite()
    assert_alike(module, expected.state_dict())
    (tested,) = trainer.test(module, datamodule=stream, verbose=False)
    (by_plain,) = alone.test(expected, library.loader(joined["test"]), verbose=False)
    assert tested and tested == pytest.approx(by_plain)


def test_continual_metrics_of_anomalib_equal_plain_test(federated):
    """Without a post-processor, the results do not depend on the validation samples."""
    library = anomalib(post_processor=False)
    stream = FederatedStream([splits_of_images(0)], Stationary(1), batch_size=BATCH, **library.options)
    metrics = ContinualMetrics()
    trainer = federated(library.module, stream, callbacks=[metrics])
    (tested,) = trainer.test(library.module, datamodule=stream, verbose=False)
    (measured,) = metrics.record["rounds"][-1]["values"]["server"]["image_AUROC"].values()
    assert measured == pytest.approx(tested["image_AUROC"])


def test_replay_of_meta_tensors_resumed_fit_equals_uninterrupted(tmp_path, trainer_of, assert_alike):
    """Checkpoints contain plain tensors, which a process without MONAI can read."""
    from monai.data import MetaTensor

    class Scans(Dataset):
        def __init__(self, client: int) -> None:
            self.images, self.labels = digits(client)

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int) -> tuple[MetaTensor, int]:
            return MetaTensor(torch.from_numpy(self.images[index])), int(self.labels[index]) % 2

    def fit(rounds: int, **resumed: Any) -> tuple[L.LightningModule, L.Trainer]:
        stream = FederatedStream([Scans(0), Scans(1)], ClassIncremental(2, 2), batch_size=BATCH, seed=0)
        torch.manual_seed(0)
        module = Classifier(MLP([64, 8, 2]), 2, lambda params: torch.optim.SGD(params, lr=0.1))
        trainer = trainer_of(strategy=FederatedStrategy(), max_epochs=rounds, callbacks=[Replay(memory_size=4)])
        trainer.fit(module, datamodule=stream, **resumed)
        return module, trainer

    _, interrupted = fit(rounds=3)
    interrupted.save_checkpoint(tmp_path / "after.ckpt")
    content = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert not any(isinstance(leaf, MetaTensor) for leaf in tree_leaves(content))
    module, _ = fit(rounds=4, ckpt_path=tmp_path / "after.ckpt")
    assert_alike(module, fit(rounds=4)[0].state_dict())


def test_graphs_with_labels_in_y_class_incremental(federated):
    """Graph data sets have no standard attribute for labels, so the test passes `y=`."""
    from torch_geometric.data import Batch

    data, scenario = graphs(client=0, samples=30), ClassIncremental(3, class_order=[0, 1, 2])
    stream = FederatedStream(
        data, scenario, IID(2), y=data.y, batch_size=BATCH, collate_fn=Batch.from_data_list, seed=0
    )
    stream.setup("fit")
    assert stream.classes == ("0", "1", "2") and stream.plan.num_rounds == 3
    for number, current in enumerate(stream.plan.train):
        assert {int(data[int(row)].y) for rows in current.values() for row in rows} == {number}
    module = Steps(GraphClassifier(), graph_loss)
    before = copy.deepcopy(module.state_dict())
    federated(module, stream)
    assert any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


def random_monai(client: int) -> Dataset:
    from monai.data import Dataset
    from monai.transforms import Compose, EnsureTyped, RandGaussianNoised, RandRotated

    images, labels = digits(client)
    noise = [RandRotated("x", range_x=0.5, prob=0.5), RandGaussianNoised("x", prob=0.9), EnsureTyped("x")]
    return Dataset(
        [{"x": image[None], "label": int(y)} for image, y in zip(images, labels, strict=True)], Compose(noise)
    )


def random_albumentations(client: int) -> Dataset:
    import albumentations as A

    return AugmentedDigits(client, A.Compose([A.Affine(rotate=(-30, 30), p=0.5), A.GaussNoise(p=0.9), A.ToTensorV2()]))


@pytest.mark.parametrize("make", [random_monai, random_albumentations])
def test_random_transforms_depend_on_client_and_round_only(make):
    """The samples do not depend on the number of workers or on the other clients."""

    def read(clients: str, round_idx: int, num_workers: int = 0) -> torch.Tensor:
        data = {name: make(int(name)) for name in clients}
        split = Split(test=0.0)
        stream = FederatedStream(data, Stationary(2), split=split, num_workers=num_workers, seed=0)
        stream.setup("fit")
        request = BatchRequest.keyed(stream.plan.train[round_idx]["1"], 0, "1", round_idx, 0)
        (batch,) = stream.read_batches([request])
        return torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch[0])

    first = read("1", round_idx=0)
    assert torch.equal(first, read("01", round_idx=0)) and torch.equal(first, read("01", round_idx=0, num_workers=1))
    assert not torch.equal(first, read("1", round_idx=1))
