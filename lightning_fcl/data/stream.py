"""FederatedStream: a data set as a stream of experiences, split over clients."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lightning_fcl.data import partition as partitioners
from lightning_fcl.data import scenarios
from lightning_fcl.data.batches import batches, plan_batches
from lightning_fcl.data.client_round import ClientRound, current_round
from lightning_fcl.data.datasets import Arrays, load
from lightning_fcl.data.scenarios import History, IntArray, Plan
from lightning_fcl.randomness import seed_of

Partition = Literal["iid", "natural", "dirichlet", "shards", "class-subsets"]

# Partitions that look at labels, and the arguments they have if none are given.
_BY_LABEL: dict[str, tuple[Callable[..., dict[str, IntArray]], dict[str, Any]]] = {
    "dirichlet": (partitioners.dirichlet, {"alpha": 0.5}),
    "shards": (partitioners.shards, {"shards_per_client": 2}),
    "class-subsets": (partitioners.class_subsets, {"classes_per_client": 2}),
}

# The scenarios of papers; fedvit alone takes the stream's own training, validation and test samples.
_PAPERS: dict[str, Callable[..., Plan]] = {
    "flwf": scenarios.flwf,
    "odfcl": scenarios.odfcl,
    "fedvit": scenarios.fedvit,
}


class FederatedStream(L.LightningDataModule):
    """A data set as a federated continual stream: rounds, experiences and clients.

    Args:
        data: Name of a data set of `lightning_fcl.data.datasets`, or its arrays. See also `from_arrays`.
        scenario: ``"class-incremental"``, ``"domain-incremental"``, or the name of a paper's: ``"flwf"``,
            ``"odfcl"``, ``"fedvit"``.
        clients: Number of clients; ignored by ``partition="natural"`` and by papers' scenarios.
        partition: How samples go to clients; ``"natural"`` gives each owner (subject, user) in the data its own.
        experiences: Number of experiences of a class-incremental stream.
        rounds_per_experience: Rounds that each experience lasts.
        samples_per_round: New samples per client and round, never used again; None: all of its experience's.
        class_order: Order of classes (or domains); None draws classes from the seed.
        order_per_client: Whether each client has an order of its own.
        history: ``"round"``, or ``"seen"`` / ``"all"`` for offline learning on what a client has seen / will see.
        batch_size: Samples per batch.
        shuffle: Whether each client's samples are shuffled every local epoch.
        drop_last: Whether an incomplete last batch is left out (batch normalisation cannot train on one sample).
        test: Fraction of samples of each class in the test set; ``"official"`` for the data set's own; or the owners
            (subjects, users) whose samples make it up: clients that join later. The scenarios
            ``"flwf"`` and ``"odfcl"`` draw test samples themselves.
        validation: Fraction of the training samples of each class in the validation set, or its owners.
        owners: The owners whose samples are trained on; None: all that are left.
        partition_args: Further arguments of the partitioner, as in ``{"alpha": 0.5}``.
        scenario_args: Further arguments of a paper's scenario.
        data_args: Further arguments of the data set's loader.
        root: Folder of the data sets; default: the environment variable LIGHTNING_FCL_DATA.
        seed: Seed of every draw; None takes that of `lightning.seed_everything`, else 0.

    Raises:
        ValueError: If the data cannot be split as asked.

    Example:
        >>> stream = FederatedStream("digits", clients=3, experiences=5, seed=0)
        >>> stream.setup("fit")
        >>> stream.plan.rounds, stream.plan.clients
        (5, ('0', '1', '2'))
    """

    def __init__(
        self,
        data: str | Arrays = "digits",
        scenario: Literal["class-incremental", "domain-incremental", "flwf", "odfcl", "fedvit"] = "class-incremental",
        clients: int = 10,
        partition: Partition = "iid",
        experiences: int = 5,
        rounds_per_experience: int = 1,
        samples_per_round: int | None = None,
        class_order: list[int] | None = None,
        order_per_client: bool = False,
        history: History = "round",
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        test: float | Literal["official"] | list[str] = 0.2,
        validation: float | list[str] = 0.0,
        owners: list[str] | None = None,
        partition_args: dict[str, Any] | None = None,
        scenario_args: dict[str, Any] | None = None,
        data_args: dict[str, Any] | None = None,
        root: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"Expected `batch_size` to be at least 1 but got {batch_size}.")
        if clients < 1:
            raise ValueError(f"Expected `clients` to be at least 1 but got {clients}.")
        if rounds_per_experience < 1:
            raise ValueError(f"Expected `rounds_per_experience` to be at least 1 but got {rounds_per_experience}.")
        if order_per_client and class_order is not None:
            raise ValueError(
                f"Expected `class_order` or `order_per_client=True` but got both, with {class_order}. Leave one out."
            )
        self.data = data
        self.scenario = scenario
        self.n_clients = clients
        self.partition = partition
        self.experiences = experiences
        self.rounds_per_experience = rounds_per_experience
        self.samples_per_round = samples_per_round
        self.class_order = class_order
        self.order_per_client = order_per_client
        self.history: History = history
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.test = test
        self.validation = validation
        self.owners = owners
        self.partition_args = partition_args or {}
        self.scenario_args = scenario_args or {}
        self.data_args = data_args or {}
        self.root = root
        self._seed = seed
        self._samples: Tensor | Dataset[Any] | None = None
        self._scale: tuple[Tensor, Tensor] | None = None
        self._unmapped: tuple[Any, tuple[Tensor, Tensor] | None] | None = None
        self.y: IntArray = scenarios.EMPTY
        self.classes: tuple[str, ...] = ()
        self.owner: NDArray[Any] | None = None

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any = None,
        client: Any = None,
        group: Any = None,
        classes: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> FederatedStream:
        """A stream of your own arrays or map-style `torch.utils.data.Dataset`.

        Args:
            x: Samples, shape (n, ...), or a data set whose items start with a sample and its label.
            y: Labels 0..C-1, shape (n,); default: the data set's ``targets``.
            client: Owner of each sample, shape (n,); it makes ``partition="natural"`` the default.
            group: Domain of each sample, shape (n,), for domain-incremental streams.
            classes: Names of the classes.
            kwargs: Arguments of `FederatedStream`.

        Raises:
            ValueError: If there are no labels, or they are no whole numbers; or if the scenario has no use for owners.

        Example:
            >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
            >>> stream = FederatedStream.from_arrays(x, y, client=torch.arange(60) % 3, experiences=2)
            >>> stream.setup("fit"); stream.plan.clients
            ('0', '1', '2')
        """
        dataset = x if isinstance(x, Dataset) else None
        y = y if y is not None else getattr(x, "targets", None)
        if y is None:
            raise ValueError("Expected `y`, the labels, or a data set with `targets` but got neither.")
        given = np.asarray(y)
        labels = given.astype(np.int64)
        if (labels != given).any():
            wrong = given[labels != given].flat[0]
            raise ValueError(f"Expected `y` to be whole numbers, the classes from 0 on, but got {wrong}. Number them.")
        names = tuple(classes) if classes is not None else tuple(map(str, range(int(labels.max()) + 1)))
        values = np.zeros((len(labels), 0), dtype=np.float32) if dataset is not None else np.asarray(x)
        scenario = kwargs.get("scenario")
        if client is not None and scenario in _PAPERS:
            raise ValueError(
                f'Expected no `client` for scenario="{scenario}", which deals the samples to clients itself, but got '
                'owners. Leave them out, or use scenario="class-incremental".'
            )
        if client is not None:
            client = np.asarray(client)
            kwargs.setdefault("partition", "natural")
        arrays = Arrays(values, labels, client, names, None, None if group is None else np.asarray(group))
        stream = cls(data=arrays, **kwargs)
        stream._samples = dataset
        return stream

    def __str__(self) -> str:
        return f'{type(self).__name__} of {self._name}, scenario="{self.scenario}"'

    @property
    def seed(self) -> int:
        """The seed of every draw."""
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def _name(self) -> str:
        return self.data if isinstance(self.data, str) else "the data"

    @property
    def group_names(self) -> list[str]:
        """Names of the plan's test groups: the classes, or the numbers of the domains."""
        number = int(self.plan.groups.max()) + 1
        return list(self.classes) if number == self.num_classes else [str(group) for group in range(number)]

    def setup(self, stage: str) -> None:
        """Load the data and draw the plan, once; ``owner`` then holds the owner of every sample, if they have any."""
        if len(self.y):
            return
        arrays = load(self.data, self.root, **self.data_args) if isinstance(self.data, str) else self.data
        self.plan = self._draw(arrays)
        reserved = {"server", "clients"} & set(self.plan.clients)
        if reserved:
            raise ValueError(f'Expected clients not to be called "{reserved.pop()}", which stands for all of them.')
        if self._samples is None:
            self._samples = torch.from_numpy(np.ascontiguousarray(arrays.x))
            if arrays.mean is not None and arrays.std is not None:
                self._scale = (torch.from_numpy(arrays.mean), torch.from_numpy(arrays.std))
        self.y, self.classes, self.owner = arrays.y, arrays.classes, arrays.client
        if self.plan.order is not None:
            self.y = np.argsort(self.plan.order)[arrays.y]
            self.classes = tuple(arrays.classes[c] for c in self.plan.order[: self.plan.outputs])

    def _draw(self, arrays: Arrays) -> Plan:
        rng = np.random.default_rng([self.seed, 0])
        papers = _PAPERS.get(self.scenario)
        if papers is not None:
            check_arguments("scenario_args", self.scenario_args, papers)
            given: dict[str, Any] = {}
            if papers is scenarios.fedvit:
                given["train"], given["validation"], given["test"] = self._parts(arrays, rng)
            return papers(arrays.y, **given, history=self.history, seed=self.seed, **self.scenario_args)
        train, validation, test = self._parts(arrays, rng)
        group = None if arrays.group is None else np.unique(arrays.group, return_inverse=True)[1].astype(np.int64)
        kind: Any = self.scenario
        entries = scenarios.incremental(
            kind,
            arrays.y,
            self._owners(arrays, train, rng),
            group,
            experiences=self.experiences,
            rounds_per_experience=self.rounds_per_experience,
            samples_per_round=self.samples_per_round,
            order=self.class_order,
            order_per_client=self.order_per_client,
            history=self.history,
            seed=self.seed,
        )
        return Plan(**entries, test=test, validation=validation)

    def _parts(self, arrays: Arrays, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
        """The training, validation and test samples."""
        rest, test = self._set_aside("test", self.test, np.arange(len(arrays.y)), arrays, rng)
        train, validation = self._set_aside("validation", self.validation, rest, arrays, rng)
        if self.owners is not None:
            train = self._set_aside("owners", self.owners, train, arrays, rng)[1]
        if not len(train):
            raise ValueError(
                f"Expected `test`, `validation` and `owners` to leave samples to train on but {self.test}, "
                f"{self.validation} and {self.owners} leave none."
            )
        return train, validation, test

    def _set_aside(
        self, name: str, what: float | str | list[str], indices: IntArray, arrays: Arrays, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Split samples into the rest and those that an argument asks for."""
        if isinstance(what, list):
            if arrays.client is None:
                wanted_instead = "no `owners`" if name == "owners" else f"`{name}` to be a fraction"
                raise ValueError(f"Expected {wanted_instead} but got {what}: {self._name} names no owners.")
            present = arrays.client[indices].astype(str)
            wanted = np.array([str(owner) for owner in what])
            missing = sorted(set(wanted) - set(present))
            if missing:
                among = ", ".join(sorted(set(present)))
                raise ValueError(f"Expected `{name}` to be among the owners {among} but got {', '.join(missing)}.")
            among_them = np.isin(present, wanted)
            return indices[~among_them], indices[among_them]
        if what == "official":
            if arrays.official_test is None:
                raise ValueError(f'Expected `test` to be a fraction but got "official", which {self._name} has not.')
            return indices[~arrays.official_test[indices]], indices[arrays.official_test[indices]]
        kept, chosen = scenarios.split(arrays.y[indices], float(what), rng)
        return indices[kept], indices[chosen]

    def _owners(self, arrays: Arrays, train: IntArray, rng: np.random.Generator) -> dict[str, IntArray]:
        if self.partition == "natural":
            if arrays.client is None:
                raise ValueError(f'Expected `partition` other than "natural": {self._name} names no clients.')
            check_arguments("partition_args", self.partition_args, None)
            parts = partitioners.by_client(arrays.client[train])
        elif self.partition == "iid":
            check_arguments("partition_args", self.partition_args, None)
            parts = partitioners.iid(len(train), self.n_clients, rng)
        elif self.partition in _BY_LABEL:
            divide, defaults = _BY_LABEL[self.partition]
            check_arguments("partition_args", self.partition_args, divide)
            parts = divide(arrays.y[train], self.n_clients, rng=rng, **{**defaults, **self.partition_args})
        else:
            names = ", ".join(["natural", "iid", *_BY_LABEL])
            raise ValueError(f"Expected `partition` to be one of {names} but got {self.partition}.")
        return {client: train[indices] for client, indices in parts.items()}

    # What the strategy asks for.

    def take(self, indices: IntArray) -> Any:
        """The samples at ``indices`` and their labels, stacked: ``[x, y]`` (or what a data set's items hold)."""
        if isinstance(self._samples, Dataset):
            items = [self._samples[int(i)] for i in indices]
            batch = default_collate(items)
            return list(batch) if isinstance(batch, tuple) else batch
        assert self._samples is not None
        x = self._samples[torch.from_numpy(indices)]
        if self._scale is not None:
            x = (x - self._scale[0]) / self._scale[1]
        return [x, torch.from_numpy(self.y[indices])]

    def map(self, function: Callable[[Tensor], Tensor], device: torch.device | None = None) -> None:
        """Replace every sample by what a function makes of it, computed once, in batches, without gradient.

        Args:
            function: From samples (batch, ...) to others (batch, ...); to those a frozen backbone gives, for example.
            device: Where it computes.
        """
        everything = np.arange(len(self.y))
        with torch.no_grad():
            parts = [
                function(self.take(part)[0].to(device)).cpu()
                for part in np.split(everything, range(256, len(everything), 256))
            ]
        self._unmapped = self._unmapped or (self._samples, self._scale)
        self._samples, self._scale = torch.cat(parts), None

    def unmap(self) -> None:
        """Bring back the samples as they were before any `map`."""
        if self._unmapped is not None:
            (self._samples, self._scale), self._unmapped = self._unmapped, None

    @property
    def draws(self) -> bool:
        """Whether taking samples runs a data set's own code, which may draw random numbers."""
        return isinstance(self._samples, Dataset)

    def client_round(self, client: str, round: int) -> ClientRound:
        """What is known of a client's part in a round."""
        indices = self.plan.train[round].get(client, scenarios.EMPTY)
        numbers = self.plan.experiences[client]
        last = round + 1 == self.plan.rounds or numbers[round + 1] != numbers[round]
        labels = torch.from_numpy(self.y[indices])
        total = self.plan.samples[client]
        new, old = self.plan.classes(round)
        return ClientRound(
            client,
            round,
            numbers[round],
            labels,
            self.num_classes,
            last,
            len(indices),
            total,
            new_classes=new,
            old_classes=old,
            task_classes=self.plan.classes_of_task(client, numbers[round]),
        )

    # Loaders, as any LightningDataModule has them.

    def train_dataloader(self) -> ClientLoader:
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
            raise ValueError(f'Expected a scenario with samples for pre-training but "{self.scenario}" has none.')
        return DataLoader(TensorDataset(*self.take(self.plan.pretrain)), batch_size=self.batch_size, shuffle=True)

    def _eval_loader(self, indices: IntArray) -> DataLoader[Any]:
        if isinstance(self._samples, Dataset):
            subset: Dataset[Any] = torch.utils.data.Subset(self._samples, indices.tolist())
        else:
            subset = TensorDataset(*self.take(indices))
        return DataLoader(subset, batch_size=max(self.batch_size, 256))


class ClientLoader:
    """The training data of all clients, as `FederatedStream.train_dataloader` hands it to the Trainer.

    A `FederatedStrategy` replaces it by the batches of each round. In a plain Trainer a stream of one client can be
    iterated as it is: an epoch is a round.
    """

    def __init__(self, stream: FederatedStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        clients = self.stream.plan.clients
        trainer = self.stream.trainer
        if len(clients) != 1 or trainer is None:
            raise ValueError(
                f'Expected a Trainer with `strategy="federated"` for a stream of {len(clients)} clients but got a '
                "plain one, which trains a single client."
            )
        round = current_round(trainer)
        if round >= self.stream.plan.rounds:
            raise ValueError(
                f"Expected `max_epochs` to be at most the stream's {self.stream.plan.rounds} rounds but got "
                f"{trainer.max_epochs}."
            )
        data = self.stream.take(self.stream.plan.train[round][clients[0]])
        generator = torch.Generator().manual_seed(seed_of(self.stream.seed, clients[0], round, "batches"))
        size = len(self.stream.plan.train[round][clients[0]])
        stream = self.stream
        plan = plan_batches(size, stream.batch_size, 1, stream.shuffle, generator, drop_last=stream.drop_last)
        yield from batches(data, plan)


def check_arguments(name: str, given: Mapping[str, Any], function: Callable[..., Any] | None) -> None:
    """Refuse arguments that a function does not have.

    Raises:
        ValueError: If one is not known; the message names the nearest.

    Example:
        >>> check_arguments("partition_args", {"alhpa": 1}, partitioners.dirichlet)
        Traceback (most recent call last):
        ValueError: Expected `partition_args` to be among alpha, min_size but got `alhpa`. Did you mean `alpha`?
    """
    ours = {"y", "n_clients", "rng", "history", "seed", "train", "validation", "test"}
    known = [p for p in inspect.signature(function).parameters if p not in ours] if function is not None else []
    for argument in given:
        if argument not in known:
            near = get_close_matches(argument, known, 1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            among = f"to be among {', '.join(known)}" if known else "to be empty"
            raise ValueError(f"Expected `{name}` {among} but got `{argument}`.{hint}")
