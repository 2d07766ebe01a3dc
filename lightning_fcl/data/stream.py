"""FederatedStream: a data module that divides a dataset into experiences and among clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, default_collate

from lightning_fcl.data.adapters import (
    Benchmark,
    StreamData,
    check_unused_arguments,
    is_client_mapping,
    samples_from_arrays,
    samples_from_benchmark,
    to_samples,
)
from lightning_fcl.data.batching import BatchPlan, BatchRequest, Collate, LoaderConfig, TakeFn, read_batches
from lightning_fcl.data.client_loader import ClientLoader
from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.datamodule_adapter import call_seeded, check_no_hooks, client_modules, delegate_hooks
from lightning_fcl.data.feature_cache import compute_features, to_pixels
from lightning_fcl.data.image_keys import key_file
from lightning_fcl.data.partition import ByClientId, Partition
from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.data.samples import DatasetSpec, Samples, data_name, loader_of, normalize_samples, select_samples
from lightning_fcl.data.scenarios import EMPTY, ClassIncremental, IntArray, Scenario, from_name
from lightning_fcl.data.split import Split, draw_split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.rng import global_seed
from lightning_fcl.validation import at_least, check_arguments


class FederatedStream(L.LightningDataModule):
    """A dataset as a federated continual stream, divided into rounds, experiences and clients.

    Args:
        data: Name of a public dataset (`lightning_fcl.data.datasets`), or a `DatasetSpec` with arguments of the
            function that loads the dataset, or an `ArrayDataset`. You can also pass a map-style dataset, which is any
            object with ``__len__`` and ``__getitem__``. Or pass a dict with the splits ``train``, ``validation`` and
            ``test``, or a LightningDataModule. The test and validation sets of a LightningDataModule are the default
            `split`. The loaders of the module define the settings below that you do not pass. For several clients, pass
            a dict or list with a dataset, data module or dict of splits for each client.
        scenario: Scenario, or the name of its class. The scenario defines the classes or domains of each round.
            Default: `ClassIncremental`.
        partition: Partition, or the name of its class. The partition divides the samples among clients. Default:
            `ByClientId` if you pass data for each client, or ``client_ids`` to `from_arrays`. Otherwise `IID`, also if
            a public dataset has owners. Do not pass a partition to a scenario that assigns samples to clients itself,
            such as the scenarios of papers.
        split: Split that selects the test and validation data. By default, the sets of a data module or of a dict of
            splits are used. For other data, a fifth of the samples is used for testing. Do not pass a split to a
            scenario that draws test samples itself.
        batch_size: Number of samples per batch. Default: 32. The test and validation loaders of a data module keep
            their batch sizes.
        shuffle: Whether each client's samples are shuffled in every local epoch. Default: True.
        drop_last: Whether an incomplete last batch is dropped. A client's only batch is never dropped. Default: False.
        num_workers: Number of processes that read the items of a dataset. The number does not change results. Default:
            0.
        collate_fn: Function that combines items of a dataset to a batch. Default: the function of each loader of a data
            module, otherwise `torch.utils.data.default_collate`.
        classes: Names of the classes of a dataset or data module, as in `from_arrays`.
        y: Targets of the samples. Needed if the targets in the items are not found, as for graphs of PyTorch Geometric.
            Pass the targets in the structure of ``data``: an array with a target for each sample, or a dict of arrays
            for the splits ``train``, ``validation`` and ``test``. For several clients, pass a dict or list with such
            targets for each client. The targets determine which client gets which samples in which round, as in
            `from_arrays`. Batches contain the items unchanged.
        seed: Seed of all random draws. Default: the seed of `lightning.seed_everything`, or 0 if no seed is set.
        backbone: Frozen backbone whose features replace the images. The features are computed once and stored in the
            user's cache. Pass a name of `lightning_fcl.models.frozen_backbone`, or a module with a method ``embed(x)``.
            The method gets stored pixels that are scaled to [0, 1], and must normalize the pixels itself. If the
            dataset draws random numbers for an image, the numbers are drawn once.

    Example:
        >>> from lightning_fcl.data.partition import IID
        >>> stream = FederatedStream("digits", ClassIncremental(num_experiences=5), IID(num_clients=3), seed=0)
        >>> stream.setup("fit")
        >>> stream.plan.num_rounds, stream.plan.clients
        (5, ('0', '1', '2'))
    """

    @check_arguments
    def __init__(
        self,
        data: StreamData = "digits",
        # The default is None: jsonargparse would pass the arguments of a default class to the selected class.
        scenario: Scenario | str | None = None,
        partition: Partition | str | None = None,
        split: Split | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        num_workers: int | None = None,
        collate_fn: Collate | None = None,
        classes: Sequence[str] | None = None,
        seed: int | None = None,
        backbone: nn.Module | str | None = None,
        y: Any = None,
    ) -> None:
        super().__init__()
        settings = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "num_workers": num_workers}
        self.inferred_settings = [name for name, value in settings.items() if value is None]
        self.batch_size = 32 if batch_size is None else batch_size
        self.shuffle = True if shuffle is None else shuffle
        self.drop_last = bool(drop_last)
        self.num_workers = num_workers or 0
        at_least(1, batch_size=self.batch_size)
        at_least(0, num_workers=self.num_workers)
        self.data = data
        self._modules = client_modules(data)
        if self._modules:
            delegate_hooks(self._modules, self)
        self.scenario = from_name(
            "scenario", ClassIncremental() if scenario is None else scenario, Scenario.__subclasses__()
        )
        self.partition = None if partition is None else from_name("partition", partition, Partition.__subclasses__())
        if self.partition is None and is_client_mapping(data) and not self.scenario.provides_clients:
            self.partition = ByClientId()
        self.split = split
        check_unused_arguments(self.scenario, partition=partition, split=split)
        self.collate_fn = collate_fn
        self._classes, self._targets, self.backbone = classes, y, backbone
        self._seed = seed
        self._torn_down = False
        # Function that returns the number of batches per client and round. `FederatedStrategy` sets it for a fit.
        self.count_batches: Callable[[], int] | None = None
        # Function that yields the batches of a client's round, for a plain Trainer with methods.
        self.local_batches: Callable[[str, int], Iterator[Any]] | None = None
        # Minimum number of samples in a batch. `FederatedStrategy` sets this number when a fit begins.
        self.min_batch_size = 1
        self.samples = Samples(torch.empty(0), EMPTY)
        # Class number of each sample. Empty if targets are not classes.
        self.y: IntArray = EMPTY

    @classmethod
    @check_arguments
    def from_arrays(
        cls,
        x: Any,
        y: Any = None,
        client_ids: Any = None,
        group: Any = None,
        classes: Sequence[str] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        **kwargs: Any,
    ) -> FederatedStream:
        """Return a stream of arrays or of a map-style `torch.utils.data.Dataset`.

        Args:
            x: Samples, shape (n, ...), or a dataset. ``collate_fn`` must be able to combine the dataset's items.
            y: Targets, shape (n, ...). Integers and strings are labels, which are numbered in ascending order.
                Floating-point targets are labels only if they are whole numbers and ``classes`` is passed. By default,
                the targets in the items of a dataset are used. The target is the second entry of a tuple, or the entry
                of a dict with the key labels, label, targets, target or y.
            client_ids: Owner of each sample, shape (n,). The default partition is then `ByClientId`.
            group: Domain of each sample, shape (n,), for domain-incremental streams.
            classes: Names of the classes, in the order of their numbers. If passed, integer labels are class numbers.
                Pass ``()`` if the targets are not classes but are integers.
            mean: Mean of the pixels of uint8 images of shape (n, channels, height, width), scaled to [0, 1]: one
                number, or one number for each channel. Images stay uint8 until they are in a batch.
            std: Standard deviation of the pixels, scaled to [0, 1]: one number, or one number for each channel.
            kwargs: Further arguments of `FederatedStream`.

        Raises:
            ValueError: If arguments have different numbers of samples, or if a target is missing or invalid. Also if
                ``client_ids`` is passed but the scenario assigns samples to clients itself.

        Example:
            >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
            >>> stream = FederatedStream.from_arrays(x, y, torch.arange(60) % 3, scenario=ClassIncremental(2))
            >>> stream.setup("fit"); stream.plan.clients
            ('0', '1', '2')
        """
        samples = samples_from_arrays(x, y, client_ids, group, classes, kwargs.get("collate_fn") or default_collate)
        stream = cls(samples if mean is None and std is None else normalize_samples(samples, mean, std), **kwargs)
        check_unused_arguments(stream.scenario, client_ids=None if client_ids is None else "owners")
        if client_ids is not None and stream.partition is None:
            stream.partition = ByClientId()
        return stream

    @classmethod
    @check_arguments
    def from_avalanche(
        cls, benchmark: Benchmark, scenario: Scenario | str | None = None, **kwargs: Any
    ) -> FederatedStream:
        """Return a stream whose data are an Avalanche benchmark or a list of Avalanche datasets.

        Args:
            benchmark: The benchmark. Its experiences keep their order, and its test stream is the test set. In a list,
                each dataset is an experience.
            scenario: Scenario of the stream. Default: `ClassIncremental` if no class is in two experiences, otherwise
                `DomainIncremental` with the experiences as domains. You can pass one of these scenarios to change
                arguments. If no class is in two experiences, the benchmark still defines ``num_experiences`` and
                ``class_order`` of `ClassIncremental`.
            kwargs: Further arguments of `FederatedStream`.
        """
        samples, scenario = samples_from_benchmark(benchmark, scenario)
        if samples.test is not None:
            kwargs.setdefault("split", Split(test="official"))
        return cls(samples, scenario, **kwargs)

    def __str__(self) -> str:
        return f"{type(self).__name__} of {data_name(self.data)}, scenario {self.scenario}"

    @property
    def seed(self) -> int:
        """Seed of all random draws."""
        return self._seed if self._seed is not None else global_seed()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes. Reading this property before `setup` loads the data and draws the plan."""
        self.setup("fit")
        return self.samples.classes

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def setup(self, stage: str) -> None:
        """Load the data and draw the plan, unless the stream has been set up already."""
        for module in self._modules:
            module.trainer = self.trainer
        if self._torn_down or not len(self.samples):
            # In a running Trainer, Lightning has already called `prepare_data` in one process.
            if self.trainer is None or self.trainer.state.fn is None:
                self.prepare_data()
            left_open = [*self.inferred_settings, *(["collate_fn"] if self.collate_fn is None else [])]
            # The state of the source files is read before the files, so that a change during reading is noticed later.
            image_key_file = None
            if self.backbone is not None and isinstance(self.data, str | DatasetSpec):
                image_key_file = key_file(self.data)
            samples = to_samples(self.data, self._classes, self.seed, left_open, self.collate_fn, self._targets)
            x = samples.x
            samples, self.plan = draw_split(samples, self.scenario, self.partition, self.split, self.seed)
            self.set_samples(samples, image_key_file if samples.x is x else None)
            self._torn_down = False
        if isinstance(self.data, L.LightningDataModule) and stage == "predict":
            call_seeded(self.seed, self.data.setup, stage)

    def setup_with_images(self) -> nn.Module | str | None:
        """Set up the stream for a test on images instead of features. Return the backbone, or None if there is none.

        The images are in the form that the backbone expects.
        """
        backbone, self.backbone = self.backbone, None
        self.setup("test")
        if backbone is not None:
            self.samples = to_pixels(self.samples)
        return backbone

    def teardown(self, stage: str) -> None:
        """Tear down the data modules that override this hook. The next `setup` sets them up again."""
        for module in self._modules:
            if is_overridden("teardown", module):
                module.teardown(stage)
                self._torn_down = True

    def set_samples(self, samples: Samples, image_key_file: Path | None = None) -> None:
        """Set the samples. Settings that were not passed are taken from the training loader of a data module.

        Args:
            samples: The samples.
            image_key_file: File with the checksum of the images, see `compute_features`.
        """
        overrides: dict[str, Any] = {} if self.collate_fn is None else {"collate_fn": self.collate_fn}
        if "num_workers" not in self.inferred_settings:
            overrides["num_workers"] = self.num_workers
        loaders = {part: replace(loading, **overrides) for part, loading in samples.loader_configs.items()}
        for name in self.inferred_settings if loaders else ():
            setattr(self, name, getattr(loaders["train"], name))
        if self.trainer is None or self.trainer.precision != "64-true":
            samples = samples.to_float32()
        self.samples = replace(samples, loader_configs=loaders, collate_fn=self.collate_fn or samples.collate_fn)
        if self.backbone is not None:
            check_no_hooks("`backbone`", self.data, self)
            device = None if self.trainer is None else self.trainer.strategy.root_device
            self.samples = compute_features(self.samples, self.backbone, self.num_workers, device, image_key_file)
        self.y = samples.targets if samples.classes else EMPTY

    # Properties and methods that the strategy uses.

    @property
    def get_samples(self) -> TakeFn:
        """Function that returns samples at given indices as a batch: ``[x, y]``, or the collated items of a dataset."""
        # The function does not refer to the stream, so that a spawned process does not get a copy of the Trainer.
        return partial(self.samples.get, seed=self.seed)

    def client_samples(self, client: str, round_idx: int, seed: int) -> Any:
        """Return a client's samples of a round as one batch of plain tensors. Each call returns the same samples."""
        return plain_samples(
            BatchRequest.keyed(self.plan.train[round_idx][client], seed, client, round_idx).load(self.get_samples)
        )

    def read_batches(self, requests: Iterable[BatchRequest], split_name: str = "train") -> Generator[Any, None, None]:
        """Yield the requested batches of a split. If `num_workers` is above 0, worker processes read the batches.

        The processes have no copy of the Trainer. Close the generator after the last batch. Otherwise, the processes
        run until the garbage collector ends them.
        """
        loading = self.loader_config(split_name)
        if loading.num_workers:
            self.samples.find_generators()
        return read_batches(partial(self.samples.get, split_name=split_name), requests, loading)

    def client_round(self, client: str, round_idx: int) -> ClientRound:
        """Return a `ClientRound`, which contains the data that methods can read about a client in a round."""
        plan = self.plan
        indices, numbers = plan.train[round_idx].get(client, EMPTY), plan.experiences[client]
        last = round_idx + 1 == plan.num_rounds or numbers[round_idx + 1] != numbers[round_idx]
        new, old = plan.class_split(round_idx)
        return ClientRound(
            client,
            round_idx,
            numbers[round_idx],
            torch.from_numpy(self.y[indices] if self.num_classes else EMPTY),
            self.num_classes,
            last,
            len(indices),
            plan.num_client_samples(client),
            new_classes=new,
            old_classes=old,
            task_classes=plan.classes_of_task(client, numbers[round_idx]),
            in_step=plan.in_step,
        )

    def sample_history(self, client: str, round_idx: int, trained: Iterable[int]) -> SampleHistory:
        """Return the indices of a client's samples in a round, and in the earlier rounds in which the client trained.

        Args:
            client: Name of the client.
            round_idx: Index of the round.
            trained: Indices of the earlier rounds in which the client trained.
        """
        numbers, train = self.plan.experiences[client], self.plan.train
        parts: dict[bool, list[IntArray]] = {True: [], False: []}
        for earlier in trained:
            parts[numbers[earlier] == numbers[round_idx]].append(train[earlier].get(client, EMPTY))
        rows = train[round_idx].get(client, EMPTY)
        return SampleHistory(rows, rows, parts[True], parts[False])

    @property
    def batch_plan(self) -> BatchPlan:
        """Settings that define how a client's samples are divided into batches."""
        return BatchPlan(self.batch_size, self.shuffle, self.drop_last, min_size=self.min_batch_size)

    def has_same_samples(self, client: str, *rounds: int) -> bool:
        """Return whether a client has the same samples in two rounds."""
        first, second = (self.plan.train[number].get(client, EMPTY) for number in rounds)
        return first is second or np.array_equal(first, second)

    # Hooks of a LightningDataModule that return loaders.

    def train_dataloader(self) -> ClientLoader:
        """Return the loader of the clients' training data. See `ClientLoader`."""
        return ClientLoader(self)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of the validation samples, or an empty list if there are none."""
        if not len(self.plan.validation):
            # Lightning expects an empty list if there is no loader, but warns about the empty list.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        return loader_of(self.samples, self.plan.validation, self.loader_config("validation"), "validation", self.seed)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the test set, which all clients share."""
        return loader_of(self.samples, self.plan.test, self.loader_config("test"), "test", self.seed)

    def predict_dataloader(self) -> Any:
        """Return the prediction loader of a data module. Without a prediction loader, return the test loader."""
        if isinstance(self.data, L.LightningDataModule) and is_overridden("predict_dataloader", self.data):
            return self.data.predict_dataloader()
        return self.test_dataloader()

    def pretrain_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the samples for pre-training the server's model before the first round."""
        if not len(self.plan.pretrain):
            raise InvalidValueError(
                f"Expected a scenario with samples for pre-training, but {self.scenario} has none.",
                argument="scenario",
                value=self.scenario,
            )
        loading = LoaderConfig(self.batch_size, shuffle=True, collate_fn=self.samples.collate("train"))
        return loading.make_loader(select_samples(self.samples, self.plan.pretrain))

    def loader_config(self, split_name: str) -> LoaderConfig:
        """Return the loader settings of a split: the settings of the data module, or the defaults of the stream.

        By default, validation and test batches of arrays have a batch size of at least 256.
        """
        draws = self.samples.is_random
        size = self.batch_size if split_name == "train" or draws else max(self.batch_size, 256)
        workers = self.num_workers if draws else 0
        loading = LoaderConfig(size, num_workers=workers, collate_fn=self.samples.collate(split_name))
        return self.samples.loader_configs.get(split_name, loading)
