"""FederatedStream: a data set as a stream of experiences, split over clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, Never

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_fcl.data.arguments import named, refuse_renamed
from lightning_fcl.data.batches import Take
from lightning_fcl.data.client_loader import ClientLoader
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.datasets import Arrays
from lightning_fcl.data.experiences import Benchmark, experiences_of
from lightning_fcl.data.partition import Natural, Partition
from lightning_fcl.data.pixels import PixelRows, normalised
from lightning_fcl.data.samples import (
    Collate,
    PublicData,
    Samples,
    name_of,
    of_anything,
    samples_of,
)
from lightning_fcl.data.scenarios import EMPTY, ClassIncremental, DomainIncremental, IntArray, Scenario
from lightning_fcl.data.split import Split, draw
from lightning_fcl.door import register_strategy
from lightning_fcl.errors import at_least
from lightning_fcl.randomness import global_seed

register_strategy()


class FederatedStream(L.LightningDataModule):
    """A data set as a federated continual stream: rounds, experiences and clients.

    Args:
        data: What the samples are: the name of a public data set (`lightning_fcl.data.datasets`), `PublicData` with
            arguments of its loader, its `Arrays`, a map-style `torch.utils.data.Dataset`, or a LightningDataModule,
            whose own test and validation sets then are the `split`. See also `from_arrays` and `from_avalanche`.
        scenario: Which classes or domains come when: an object, or its class's name. Default: `ClassIncremental`.
        partition: How samples go to clients: an object, or its class's name. Default: `IID`; none for scenarios that
            deal the samples to clients themselves, such as those of papers.
        split: What is tested and validated on. None for scenarios that draw test samples themselves.
        batch_size: Samples per batch.
        shuffle: Whether each client's samples are shuffled every local epoch.
        drop_last: Whether an incomplete last batch is left out, unless it is a client's only one. Batch
            normalisation cannot train on one sample: such a batch is refused by name.
        num_workers: Processes that read the items of a data set; the result does not depend on it.
        collate_fn: Makes a batch of a data set's items; default: that of the data module, or torch's.
        seed: Seed of every draw; None takes that of `lightning.seed_everything`, else 0.
        old: Refused, with the new name.

    Raises:
        ValueError: If the data cannot be split as asked.
        TypeError: If an argument has another name now.

    Example:
        >>> from lightning_fcl.data.partition import IID
        >>> stream = FederatedStream("digits", ClassIncremental(experiences=5), IID(clients=3), seed=0)
        >>> stream.setup("fit")
        >>> stream.plan.rounds, stream.plan.clients
        (5, ('0', '1', '2'))
    """

    def __init__(
        self,
        data: str | PublicData | Arrays | Samples | Dataset[Any] | L.LightningDataModule = "digits",
        # Not "ClassIncremental": jsonargparse hands the arguments of a default on to the class that takes its place.
        scenario: Scenario | str | None = None,
        partition: Partition | str | None = None,
        split: Split | None = None,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        seed: int | None = None,
        **old: Never,
    ) -> None:
        super().__init__()
        refuse_renamed(type(self).__name__, old, signature(FederatedStream).parameters)
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers)
        self.data = data
        self.scenario = named(
            "scenario", ClassIncremental() if scenario is None else scenario, Scenario.__subclasses__()
        )
        kinds = Partition.__subclasses__()
        self.partition = None if partition is None else named("partition", partition, kinds)
        self.split = split
        for argument, given, own in (
            ("partition", partition, self.scenario.own_clients),
            ("split", split, self.scenario.own_split),
        ):
            if own and given is not None:
                raise ValueError(
                    f"Expected no `{argument}` for `{self.scenario}`, which draws the samples of "
                    f"{'clients' if argument == 'partition' else 'tests'} itself, but got {given}. Leave it out."
                )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self._seed = seed
        self._unmapped: Samples | None = None
        self.samples = Samples(torch.empty(0), EMPTY)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        group: Any = None,
        classes: Sequence[str] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        **kwargs: Any,
    ) -> FederatedStream:
        """A stream of your own arrays or map-style `torch.utils.data.Dataset`.

        Args:
            x: Samples, shape (n, ...), float32 or whole numbers of any type; or a data set, whose items may be anything
                that ``collate_fn`` makes a batch of.
            y: Targets, shape (n, ...): labels, whole numbers or strings, numbered in ascending order; `classes` keeps
                them as names; or others where the scenario needs no classes. Default: the data set's
                ``targets``, or what its items hold: the second entry of a tuple, or that of a dict called labels,
                label, targets, target or y.
            client: Owner of each sample, shape (n,); it makes `Natural` the default partition.
            group: Domain of each sample, shape (n,), for domain-incremental streams.
            classes: Names of the classes, in the order of their numbers, which labels that are whole numbers then are;
                ``()``: targets are none, even if they are whole numbers.
            mean: Of uint8 images, shape (n, channels, height, width), the mean of their pixels, scaled to [0, 1]: a
                number, or one for each channel, as torchvision's ``Normalize`` has it. The images stay uint8, also
                where methods remember them; batches are normalised.
            std: The standard deviation of these pixels.
            kwargs: Arguments of `FederatedStream`.

        Raises:
            ValueError: If there are no targets, or the columns do not fit together; or if the scenario has no use for
                owners.

        Example:
            >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
            >>> stream = FederatedStream.from_arrays(x, y, torch.arange(60) % 3, scenario=ClassIncremental(2))
            >>> stream.setup("fit"); stream.plan.clients
            ('0', '1', '2')
        """
        collate_fn = kwargs.get("collate_fn") or default_collate
        samples = of_anything(x, y, client, group, classes, collate_fn)
        samples = samples if mean is None and std is None else normalised(samples, mean, std)
        stream = cls(samples, **kwargs)
        if client is not None and stream.scenario.own_clients:
            raise ValueError(
                f"Expected no `client` for `{stream.scenario}`, which deals the samples to clients itself, but got "
                "owners. Leave them out, or use `ClassIncremental`."
            )
        if client is not None and stream.partition is None:
            stream.partition = Natural()
        return stream

    @classmethod
    def from_avalanche(
        cls, benchmark: Benchmark, scenario: Scenario | str | None = None, **kwargs: Any
    ) -> FederatedStream:
        """A stream of an Avalanche benchmark, or of a list of its data sets, split over clients.

        Args:
            benchmark: Its experiences come in their order, its test stream is the test set. Of a list, every data set
                is an experience, and ``split`` says what is tested on.
            scenario: Default: `ClassIncremental` with the experiences' classes where no class comes twice, otherwise
                `DomainIncremental`, an experience being a domain. Give one of these, for its other arguments, with the
                experiences left at their default.
            kwargs: Arguments of `FederatedStream`.

        Raises:
            ValueError: If there is no experience.
        """
        samples, order = experiences_of(benchmark)
        default: Scenario = DomainIncremental() if order is None else ClassIncremental()
        scenario = default if scenario is None else named("scenario", scenario, Scenario.__subclasses__())
        if isinstance(scenario, ClassIncremental) and order is not None:
            flat = [label for labels in order for label in labels]
            scenario = replace(scenario, experiences=[len(labels) for labels in order], class_order=flat)
        if samples.test is not None:
            kwargs.setdefault("split", Split(test="official"))
        return cls(samples, scenario, **kwargs)

    def __str__(self) -> str:
        return f"{type(self).__name__} of {name_of(self.data)}, scenario {self.scenario}"

    @property
    def seed(self) -> int:
        """The seed of every draw."""
        return self._seed if self._seed is not None else global_seed()

    @property
    def y(self) -> IntArray:
        """The class of each sample, as the scenario numbers them; empty where targets are no classes."""
        return self.samples.targets if self.samples.classes else EMPTY

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; before `setup` the data are read, and the plan drawn, as it would do."""
        self.setup("fit")
        return self.samples.classes

    @property
    def owner(self) -> NDArray[Any] | None:
        """The owner of every sample, if the data name them."""
        return self.samples.owner

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def group_names(self) -> list[str]:
        """Names of the plan's test groups: the classes, or the numbers of the domains."""
        number = int(self.plan.groups.max()) + 1
        return list(self.classes) if number == self.num_classes else [str(group) for group in range(number)]

    def setup(self, stage: str) -> None:
        """Load the data and draw the plan, once."""
        if len(self.samples):
            return
        samples = samples_of(self.data)
        own = isinstance(self.data, L.LightningDataModule)
        self.plan = draw(samples, self.scenario, self.partition, self.split, self.seed, own)
        reserved = {"server", "clients"} & set(self.plan.clients)
        if reserved:
            raise ValueError(f'Expected clients not to be called "{reserved.pop()}", which stands for all of them.')
        if self.plan.order is not None:
            names = tuple(samples.classes[c] for c in self.plan.order[: self.plan.outputs])
            samples = replace(samples, targets=np.argsort(self.plan.order)[samples.targets], classes=names)
        self.samples = replace(samples, collate_fn=self.collate_fn or samples.collate_fn)

    # What the strategy asks for.

    @property
    def take(self) -> Take:
        """Gives the samples at indices and their targets, stacked: ``[x, y]``, or what a data set's items hold."""
        return self.samples.take  # without the stream: a process that is spawned to read gets no Trainer

    def map(self, function: Callable[[Tensor], Tensor], device: torch.device | None = None) -> None:
        """Replace every sample by what a function makes of it, computed once, in batches, without gradient.

        Args:
            function: From samples (batch, ...) to others (batch, ...); to those a frozen backbone gives, for example.
            device: Where it computes.
        """
        everything = np.arange(len(self.samples))
        with torch.no_grad():
            parts = [
                function(self.take(part)[0].to(device)).cpu()
                for part in np.split(everything, range(256, len(everything), 256))
            ]
        self._unmapped = self._unmapped or self.samples
        self.samples = replace(self.samples, x=torch.cat(parts), scale=None)

    def unmap(self) -> None:
        """Bring back the samples as they were before any `map`."""
        if self._unmapped is not None:
            self.samples, self._unmapped = self._unmapped, None

    @property
    def draws(self) -> bool:
        """Whether taking samples runs a data set's own code, which may draw random numbers."""
        return isinstance(self.samples.x, Dataset)

    def client_round(self, client: str, round: int) -> ClientRound:
        """What is known of a client's part in a round."""
        indices = self.plan.train[round].get(client, EMPTY)
        numbers = self.plan.experiences[client]
        last = round + 1 == self.plan.rounds or numbers[round + 1] != numbers[round]
        new, old = self.plan.classes(round)
        return ClientRound(
            client,
            round,
            numbers[round],
            torch.from_numpy(self.y[indices] if self.num_classes else EMPTY),
            self.num_classes,
            last,
            len(indices),
            self.plan.samples_of(client),
            new_classes=new,
            old_classes=old,
            task_classes=self.plan.classes_of_task(client, numbers[round]),
        )

    def client_rounds(self, clients: Sequence[str], round: int, rehearsed: IntArray | None = None) -> ClientRounds:
        """The parts of several clients in a round, each made when it is asked for."""
        samples = np.array([len(self.plan.train[round][client]) for client in clients], dtype=np.int64)
        return ClientRounds(round, clients, samples, lambda client: self.client_round(client, round), rehearsed)

    # Loaders, as any LightningDataModule has them.

    def train_dataloader(self) -> StreamLoader:
        """The clients' training data; a `FederatedStrategy` turns it into the batches of each round."""
        return ClientLoader(self)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """The validation samples, if any."""
        if not len(self.plan.validation):
            # Lightning warns of an empty list of loaders, which is what it asks for where there is none.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
        return self._eval_loader(self.plan.validation) if len(self.plan.validation) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """The common test set."""
        return self._eval_loader(self.plan.test)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The common test set."""
        return self.test_dataloader()

    def pretrain_dataloader(self) -> DataLoader[Any]:
        """Samples for the server's model before the first round."""
        if not len(self.plan.pretrain):
            raise ValueError(f"Expected a scenario with samples for pre-training but {self.scenario} has none.")
        return DataLoader(self._rows(self.plan.pretrain), batch_size=self.batch_size, shuffle=True)

    def _rows(self, indices: IntArray) -> Dataset[Any]:
        """Some samples as a data set; stored pixels are normalised batch by batch."""
        return TensorDataset(*self.take(indices)) if self.samples.scale is None else PixelRows(self.samples, indices)

    def _eval_loader(self, indices: IntArray) -> DataLoader[Any]:
        size = max(self.batch_size, 256)
        if not isinstance(self.samples.x, Dataset):
            return DataLoader(self._rows(indices), batch_size=size)
        subset: Dataset[Any] = Subset(self.samples.x, indices.tolist())
        return DataLoader(subset, size, num_workers=self.num_workers, collate_fn=self.samples.collate_fn)


StreamLoader = ClientLoader[FederatedStream]
"""What `FederatedStream.train_dataloader` gives."""
