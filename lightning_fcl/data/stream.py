"""FederatedStream: a data set as a stream of experiences, split over clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
from lightning_fcl.data.partition import ByClientId, Partition
from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.data.samples import Samples, data_name, loader_of, normalize_samples, select_samples
from lightning_fcl.data.scenarios import EMPTY, ClassIncremental, IntArray, Scenario, from_name
from lightning_fcl.data.split import Split, draw_split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.rng import global_seed
from lightning_fcl.validation import at_least, check_arguments


class FederatedStream(L.LightningDataModule):
    """A data set as a federated continual stream: rounds, experiences and clients.

    Args:
        data: The name of a public data set (`lightning_fcl.data.datasets`), `DatasetSpec` with arguments of its loader,
            its `ArrayDataset`, or a map-style data set: anything with ``__len__`` and ``__getitem__``; a
            LightningDataModule, whose own test and validation sets then are the `split`, and whose loaders say what is
            left open below; a dict of the splits ``train``, ``validation`` and ``test``; or a dict, or a list, of one
            of these for each client.
        scenario: Which classes or domains come when: an object, or its class's name. Default: `ClassIncremental`.
        partition: How samples go to clients: an object, or its class's name. Default: `IID`; none for scenarios that
            deal the samples to clients themselves, such as those of papers.
        split: What is tested and validated on. None for scenarios that draw test samples themselves.
        batch_size: Samples per batch, default 32. A data module's test and validation samples keep their own.
        shuffle: Whether each client's samples are shuffled every local epoch, default True.
        drop_last: Whether an incomplete last batch is left out, unless it is a client's only one.
        num_workers: Processes that read the items of a data set; the result does not depend on it.
        collate_fn: Makes a batch of a data set's items; default: that of each of the data module's loaders, or torch's.
        classes: Of a data set or data module, as in `from_arrays`.
        y: Targets of the samples if their items hold them in an unknown place, such as graphs of PyTorch Geometric, in
            the structure of ``data``: an array with a target for each sample, a dict of them for the splits
            ``train``, ``validation`` and ``test``, and a dict or a list of these for clients. As in `from_arrays`, they
            decide who gets which samples when. Batches hold what the items hold.
        seed: Seed of every draw; None takes that of `lightning.seed_everything`, else 0.
        backbone: A frozen backbone whose features take the images' place, made once and kept in the user's cache: a
            name of `lightning_fcl.models.frozen_backbone`, or a module with ``embed(x)``, which takes stored pixels,
            scaled to [0, 1], and normalises them by itself. What a data set draws for an image is drawn once.

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
        # Not "ClassIncremental": jsonargparse hands the arguments of a default on to the class that takes its place.
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
        self.count_batches: Callable[[], int] | None = None  # a client's in a round, as a federation that fits says
        # Yields the batches of a client's round in a plain Trainer with methods.
        self.local_batches: Callable[[str, int], Iterator[Any]] | None = None
        self.min_batch_size = 1  # the samples that a batch needs, which a federation finds out when a fit begins
        self.samples = Samples(torch.empty(0), EMPTY)
        self.y: IntArray = EMPTY  # the class of each sample, as the scenario numbers them, where targets are classes

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
        """A stream of your own arrays or map-style `torch.utils.data.Dataset`.

        Args:
            x: Samples, shape (n, ...); or a data set, whose items may be anything that ``collate_fn`` makes a batch of.
            y: Targets, shape (n, ...): labels, whole numbers or strings, numbered in ascending order; or others, as all
                of a floating type are. Default: what a data set's items hold: the second entry of a tuple, or that of
                a dict called labels, label, targets, target or y.
            client_ids: Owner of each sample, shape (n,); it makes `ByClientId` the default partition.
            group: Domain of each sample, shape (n,), for domain-incremental streams.
            classes: Names of the classes, in the order of their numbers, which labels that are whole numbers then are;
                ``()``: targets are none, even if they are whole numbers.
            mean: Of uint8 images, shape (n, channels, height, width), which stay such until they are in a batch, the
                mean of their pixels, scaled to [0, 1]: a number, or one for each channel.
            std: The standard deviation of these pixels.
            kwargs: Arguments of `FederatedStream`.

        Raises:
            ValueError: If there are no targets, if columns do not fit together, or the scenario needs no owners.

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
        """A stream of an Avalanche benchmark, or of a list of its data sets, split over clients.

        Args:
            benchmark: Its experiences come in their order, its test stream is the test set; of a list, each data set is
                an experience.
            scenario: Default: `ClassIncremental` where no class comes twice, else `DomainIncremental`, an experience a
                domain; or one of these with other arguments than the experiences.
            kwargs: Arguments of `FederatedStream`.
        """
        samples, scenario = samples_from_benchmark(benchmark, scenario)
        if samples.test is not None:
            kwargs.setdefault("split", Split(test="official"))
        return cls(samples, scenario, **kwargs)

    def __str__(self) -> str:
        return f"{type(self).__name__} of {data_name(self.data)}, scenario {self.scenario}"

    @property
    def seed(self) -> int:
        """The seed of every draw."""
        return self._seed if self._seed is not None else global_seed()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; before `setup` the data are read, and the plan drawn, as it would do."""
        self.setup("fit")
        return self.samples.classes

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def setup(self, stage: str) -> None:
        """Load the data and draw the plan, once."""
        for module in self._modules:
            module.trainer = self.trainer
        if self._torn_down or not len(self.samples):
            if self.trainer is None or self.trainer.state.fn is None:  # otherwise Lightning has, in one process
                self.prepare_data()
            left_open = [*self.inferred_settings, *(["collate_fn"] if self.collate_fn is None else [])]
            samples = to_samples(self.data, self._classes, self.seed, left_open, self.collate_fn, self._targets)
            samples, self.plan = draw_split(samples, self.scenario, self.partition, self.split, self.seed)
            self.set_samples(samples)
            self._torn_down = False
        if isinstance(self.data, L.LightningDataModule) and stage == "predict":
            call_seeded(self.seed, self.data.setup, stage)

    def setup_with_images(self) -> nn.Module | str | None:
        """As `setup`, to test on images in place of features, as the backbone takes them, which comes back."""
        backbone, self.backbone = self.backbone, None
        self.setup("test")
        if backbone is not None:
            self.samples = to_pixels(self.samples)
        return backbone

    def teardown(self, stage: str) -> None:
        """Let data modules close what they have open; what comes next sets them up anew."""
        for module in self._modules:
            if is_overridden("teardown", module):
                module.teardown(stage)
                self._torn_down = True

    def set_samples(self, samples: Samples) -> None:
        """Take samples in; what the arguments leave open is as the training loader of a data module has it."""
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
            self.samples = compute_features(self.samples, self.backbone, self.num_workers, device)
        self.y = samples.targets if samples.classes else EMPTY

    # What the strategy asks for.

    @property
    def get_samples(self) -> TakeFn:
        """Gives the samples at indices and their targets, stacked: ``[x, y]``, or what a data set's items hold."""
        return partial(self.samples.get, seed=self.seed)  # without the stream: a spawned process gets no Trainer

    def client_samples(self, client: str, round_idx: int, seed: int) -> Any:
        """Return a client's samples of a round, stacked, as plain tensors. Each call returns the same samples."""
        return plain_samples(
            BatchRequest.keyed(self.plan.train[round_idx][client], seed, client, round_idx).load(self.get_samples)
        )

    def read_batches(self, requests: Iterable[BatchRequest], split_name: str = "train") -> Generator[Any, None, None]:
        """Yield the requested batches of a part, read by `num_workers` processes, which have no Trainer.

        Close the generator after the last batch. Otherwise its processes stay until the garbage collector ends them.
        """
        loading = self.loader_config(split_name)
        if loading.num_workers:
            self.samples.find_generators()
        return read_batches(partial(self.samples.get, split_name=split_name), requests, loading)

    def client_round(self, client: str, round_idx: int) -> ClientRound:
        """What is known of a client's part in a round."""
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
        """Return the numbers of a client's samples of a round and of the earlier rounds that the client trained in."""
        numbers, train = self.plan.experiences[client], self.plan.train
        parts: dict[bool, list[IntArray]] = {True: [], False: []}
        for earlier in trained:
            parts[numbers[earlier] == numbers[round_idx]].append(train[earlier].get(client, EMPTY))
        rows = train[round_idx].get(client, EMPTY)
        return SampleHistory(rows, rows, parts[True], parts[False])

    @property
    def batch_plan(self) -> BatchPlan:
        """How a client's samples become batches."""
        return BatchPlan(self.batch_size, self.shuffle, self.drop_last, min_size=self.min_batch_size)

    def has_same_samples(self, client: str, *rounds: int) -> bool:
        """Return whether a client has the same samples in two rounds."""
        first, second = (self.plan.train[number].get(client, EMPTY) for number in rounds)
        return first is second or np.array_equal(first, second)

    # Loaders, as any LightningDataModule has them.

    def train_dataloader(self) -> ClientLoader:
        """The clients' training data; a `FederatedStrategy` turns it into the batches of each round."""
        return ClientLoader(self)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """The validation samples, if any."""
        if not len(self.plan.validation):
            # Lightning asks for an empty list of loaders, and warns of one.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        return loader_of(self.samples, self.plan.validation, self.loader_config("validation"), "validation", self.seed)

    def test_dataloader(self) -> DataLoader[Any]:
        """The common test set."""
        return loader_of(self.samples, self.plan.test, self.loader_config("test"), "test", self.seed)

    def predict_dataloader(self) -> Any:
        """What a data module predicts; of other data the common test set."""
        if isinstance(self.data, L.LightningDataModule) and is_overridden("predict_dataloader", self.data):
            return self.data.predict_dataloader()
        return self.test_dataloader()

    def pretrain_dataloader(self) -> DataLoader[Any]:
        """Samples for the server's model before the first round."""
        if not len(self.plan.pretrain):
            raise InvalidValueError(
                f"Expected a scenario with samples for pre-training but {self.scenario} has none.",
                argument="scenario",
                value=self.scenario,
            )
        loading = LoaderConfig(self.batch_size, shuffle=True, collate_fn=self.samples.collate("train"))
        return loading.make_loader(select_samples(self.samples, self.plan.pretrain))

    def loader_config(self, split_name: str) -> LoaderConfig:
        """How a data module loads what is for a part, or as other data are; arrays are tested in larger batches."""
        draws = self.samples.is_random
        size = self.batch_size if split_name == "train" or draws else max(self.batch_size, 256)
        workers = self.num_workers if draws else 0
        loading = LoaderConfig(size, num_workers=workers, collate_fn=self.samples.collate(split_name))
        return self.samples.loader_configs.get(split_name, loading)
