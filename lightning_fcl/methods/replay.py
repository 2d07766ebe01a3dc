"""Replay: train on stored samples of earlier experiences or rounds in addition to new samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.base import ReplaySamples, ReplayTransform
from lightning_fcl.methods.buffer_data import Agent, select
from lightning_fcl.methods.context import Client, is_labelled
from lightning_fcl.methods.dry_run import first_indices
from lightning_fcl.methods.episodic import add_task_labels, check_memory_size, has_task, without_task
from lightning_fcl.methods.functional import evaluation_mode
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.replay_samples import check_transform
from lightning_fcl.rng import derive_seed
from lightning_fcl.validation import one_of, validated

if TYPE_CHECKING:
    from lightning_fcl.data.avalanche import ExemplarsBuffer

# Avalanche buffers whose whole state is the selected samples, their order, and a priority or group for each sample.
KINDS = ("ReservoirSamplingBuffer", "ClassBalancedBuffer", "ExperienceBalancedBuffer", "ParametricBuffer")

Policy = Literal["reservoir", "class-balanced", "refresh"]

# Prefix of the names of client state entries that store samples which are dicts.
_SAMPLE = "sample."


@dataclass(eq=False)
class Replay(Method):
    """Experience replay (Chaudhry et al., 2019): add stored samples of earlier data to each batch.

    With a `FederatedStream`, each replay sample joins one batch in every local epoch. Otherwise, each batch of n
    samples gets n replay samples, or all replay samples if there are fewer than n. Each new sample is offered to the
    client's buffer once. Replay samples never leave the client.

    Samples are pairs ``[x, y]`` of tensors, or, in a federation, dicts of tensors. The client stores plain tensors, so
    that all batches of a fit are plain tensors. A subclass of `torch.Tensor`, such as MONAI's ``MetaTensor``, reaches
    the training step without its class and metadata.

    In a plain Trainer without a `FederatedStream`, samples have no numbers, so that repeated samples are not
    recognized. Then ``update="round"`` offers the samples of each epoch to the buffer. ``update="experience"`` offers
    the samples of the last epoch of a fit.

    Args:
        memory_size: Maximum number of samples in the buffer. A float is a fraction of the client's samples in the whole
            `FederatedStream`. With ``policy="refresh"`` it is the number per task (experience).
        policy: How the buffer selects samples. ``"reservoir"``: reservoir sampling over all offered samples.
            ``"class-balanced"``: equal shares of each class seen. ``"refresh"``: each update draws the samples of the
            current task again (Usmanova et al., 2021, section 5.3), at random from the samples of the round. If the
            round lacks samples of the task's earlier rounds, the draw includes the samples of the task in the buffer.
        update: When new samples become replay samples. ``"round"``: in the client's next round. ``"experience"``: when
            the client enters a later experience, so that no sample of the current experience is replayed.
        oversample: Whether to repeat the replay samples until their number equals the number of samples offered so far.
            Earlier data then have the same weight as if the buffer had stored every sample. Requires
            ``policy="reservoir"``.
        include_base: Whether the samples of the stream's base session are offered to each client's buffer first.
        buffer: A buffer of Avalanche, which replaces ``memory_size`` and ``policy``: ``ReservoirSamplingBuffer``,
            ``ClassBalancedBuffer``, ``ExperienceBalancedBuffer`` or ``ParametricBuffer``. ``ExperienceBalancedBuffer``
            treats all samples of one update as one experience. The selection strategy of ``ParametricBuffer`` gets the
            module with the client's state as ``strategy.model``.
        transform: Callable that augments each replay sample every time it is added to a batch, such as a transform of
            ``torchvision.transforms.v2``. For a pair, the callable gets the input ``x`` of one sample as the dataset
            returned it. For a dict, it gets the dict of one sample. The values are plain tensors without the batch
            dimension. The callable must return the same shape and dtype. Its random numbers depend on the seed, the
            client, the round and the batch. The stored samples do not change.

    Raises:
        TypeError: If ``buffer`` is of another class, its selection strategy requires Avalanche's training loop, or
            ``transform`` is not callable.
        ValueError: If an argument is out of range, arguments conflict, the stream has no base session for
            ``include_base``, or ``transform`` changes the shape or dtype of a sample.

    Example:
        >>> Replay(memory_size=10, policy="refresh", update="round").memory_size
        10
    """

    citations: ClassVar[tuple[str, ...]] = ("chaudhry2019replay",)

    needs: ClassVar[Needs] = Needs(dict_batches=True, tensors=True)
    accumulates: ClassVar[bool] = True

    # The order of the types matters: jsonargparse takes the first type that matches.
    memory_size: int | float = validated(200, check_memory_size)
    policy: Policy = validated("class-balanced", one_of, get_args(Policy))
    update: Literal["round", "experience"] = validated("experience", one_of, ("round", "experience"))
    oversample: bool = False
    include_base: bool = False
    buffer: ExemplarsBuffer | None = None
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer is not None:
            if type(self.buffer).__name__ not in KINDS:
                raise InvalidTypeError(
                    f"Expected `buffer` to be one of Avalanche's {', '.join(KINDS)}, but got "
                    f"`{type(self.buffer).__name__}`.",
                    hint="Use an object of one of these classes. They do not require Avalanche's training loop.",
                    argument="buffer",
                )
            if self.oversample:
                raise InvalidValueError(
                    "Expected either `oversample` or `buffer`, but got both.",
                    hint="Leave `oversample` out, or leave `buffer` out and use `policy` and `memory_size`.",
                    argument="oversample",
                    value=self.oversample,
                )
            self.memory_size = self.buffer.max_size
        if self.oversample and self.policy != "reservoir":
            raise InvalidValueError(
                f'Expected `policy="reservoir"` with `oversample=True`, but got "{self.policy}".',
                hint='Use `policy="reservoir"`, or leave `oversample` out.',
                argument="policy",
                value=self.policy,
            )

    def fingerprint(self) -> dict[str, Any]:
        policy = {"policy": type(self.buffer).__name__} if self.buffer is not None else {}
        kind = type(self.transform).__qualname__
        transform = {"transform": getattr(self.transform, "__qualname__", kind)} if self.transform is not None else {}
        return super().fingerprint() | policy | transform

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.include_base or trainer.ckpt_path is not None:
            return
        stream: Any = trainer.datamodule  # type: ignore[attr-defined]
        federation = find_federation(trainer)
        if federation is None or not len(stream.plan.base_samples):
            source = "a Trainer without a federation" if federation is None else stream
            raise InvalidValueError(
                'Expected a federation whose stream has a base session, as with `scenario="odfcl"`, for '
                f"`include_base=True`, but got {source}.",
                hint="Leave `include_base` out.",
                argument="include_base",
                value=self.include_base,
            )
        data = plain_samples(stream.get_samples(stream.plan.base_samples))
        for name in stream.plan.clients:
            has_state = not federation.hosts(name) or federation.server.client_store.get_section(
                name, self.section_name
            )
            # An earlier fit may have stored samples.
            if not has_state:
                client_round = ClientRound(name, round_idx=0, num_stream_samples=stream.plan.num_client_samples(name))
                generator = torch.Generator().manual_seed(derive_seed(federation.seed, name, "base session"))
                client = Client(client_round=client_round, module=pl_module, federation=federation, generator=generator)
                federation.server.client_store.set_section(
                    name, self.section_name, self._updated({}, client, state_tensors(pl_module), data)
                )

    @property
    def replay_transform(self) -> ReplayTransform | None:
        return self.transform

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise ValueError if `transform` rejects a sample, or changes the sample's shape or dtype."""
        stream = find_stream(trainer)
        if self.transform is None or stream is None or (rows := first_indices(stream)) is None:
            return
        # Reading a sample may draw random numbers in the dataset's own code.
        with isolate_rng():
            sample = plain_samples(stream.get_samples(rows[:1]))
        if isinstance(sample, Mapping) or is_labelled(sample):
            check_transform(self.transform, sample)

    def replay_samples(self, client: Client) -> ReplaySamples | None:
        memory = client.method_state
        if not memory:
            return None
        names = [name for name in memory if name.startswith(_SAMPLE)]
        samples = {name: memory[name] for name in names or ("x", "y")}
        if self.oversample:
            first = next(iter(samples.values()))
            times = torch.arange(int(memory["seen"]), device=first.device) % len(first)
            samples = {name: value[times] for name, value in samples.items()}
        if not names:
            return samples["x"], samples["y"]
        return {name.removeprefix(_SAMPLE): value for name, value in samples.items()}

    def _size(self, client_round: ClientRound) -> int:
        if isinstance(self.memory_size, int):
            return self.memory_size
        if not client_round.num_stream_samples:
            raise InvalidValueError(
                f"Expected `memory_size` to be a number of samples, but got the fraction {self.memory_size}. A "
                "fraction requires a `FederatedStream`, which defines the total number of samples.",
                hint="Pass a whole number, such as `memory_size=200`.",
                argument="memory_size",
                value=self.memory_size,
            )
        return max(1, round(self.memory_size * client_round.num_stream_samples))

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        if self.update == "experience":
            return client.method_state
        history, memory = client.history, client.method_state
        should_refresh = (
            self.buffer is None and self.policy == "refresh" and (history is None or history.covers_experience)
        )
        if should_refresh:
            memory = without_task(memory, client.client_round.experience_idx)
        if history is not None:
            data = client.select_samples(data, history.new_in_experience if should_refresh else history.new)
        return self._updated(memory, client, trained_state, data)

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        if self.update == "round":
            return client.method_state
        return self._updated(client.result or client.method_state, client, trained_state, data)

    def _updated(self, memory: StateSection, client: Client, trained_state: State, data: Batch) -> StateSection:
        """Return the client state ``memory`` after new samples were offered to its buffer."""
        client_round, samples = client.client_round, _entries(data)
        first = next(iter(samples.values()))
        if not len(first):
            return memory
        device, size = first.device, self._size(client_round)
        memory = {name: value.to(device) for name, value in memory.items()}
        new = {**samples}
        labels = client_round.labels if len(client_round.labels) == len(first) else samples.get("y", first)
        if not _are_classes(samples.get("y")):
            new["class"] = labels.to(device) if _are_classes(labels) else torch.zeros(len(first), dtype=torch.long)
        if self.buffer is None and self.policy == "refresh":
            # If the buffer has samples of this experience, choose again among these and the new samples.
            if has_task(memory, client_round.experience_idx):
                of_task = memory["task"] == client_round.experience_idx
                new = {name: concat_nested([memory[name][of_task], value]) for name, value in new.items()}
            number = len(next(iter(new.values())))
            indices = torch.randperm(number, generator=client.generator)[:size]
            return add_task_labels(
                memory, {name: value[indices] for name, value in new.items()}, client_round.experience_idx
            )
        new["task"] = torch.full((len(first),), client_round.experience_idx, device=device)
        num_seen = len(first) + (int(memory["seen"]) if memory else 0)
        if memory:
            new = {name: concat_nested([memory[name], value]) for name, value in new.items()}
        places: StateSection = {name: memory[name].cpu() for name in ("priority", "group") if name in memory}
        labels = new["class"] if "class" in new else new["y"]
        names = [name for name in new if name.startswith(_SAMPLE)]

        def sample(index: int) -> Any:
            values_by_name = {name.removeprefix(_SAMPLE): new[name][index] for name in names}
            return values_by_name or new["x"][index]

        if self.buffer is None:
            groups = labels.cpu() if self.policy == "class-balanced" else torch.zeros(len(labels), dtype=torch.long)
            indices, order = sample_reservoirs(size, groups, places.get("priority", torch.zeros(0)), client.generator)
        else:
            with self._holding(self.buffer, client, trained_state) as agent:
                indices, order = select(
                    self.buffer, sample, labels.cpu(), new["task"].cpu(), places, agent, client.generator
                )
        return {**{name: value[indices] for name, value in new.items()}, **order, "seen": torch.tensor(num_seen)}

    @contextmanager
    def _holding(self, buffer: ExemplarsBuffer, client: Client, trained_state: State) -> Iterator[Agent]:
        """Temporarily load the client's trained state, and yield the `Agent` that a selection strategy may read."""
        module = client.module
        previous_state = {name: value.detach().clone() for name, value in state_tensors(module).items()}
        load_state_tensors(module, trained_state)
        try:
            with evaluation_mode(module):
                yield Agent(buffer, module, client.client_round.experience_idx)
        finally:
            load_state_tensors(module, previous_state)


def sample_reservoirs(
    size: int, groups: Tensor, priority: Tensor, generator: torch.Generator
) -> tuple[Tensor, StateSection]:
    """Return the positions and priorities of samples that reservoir sampling selects in each group.

    The selection is like that of Avalanche's ``ClassBalancedBuffer``.

    Each new sample draws a priority in [0, 1). Each group keeps its samples with the highest priorities. The result is
    a uniform random choice of all samples that the group has been offered.

    Args:
        size: Maximum number of samples to keep, divided equally among the groups.
        groups: The group of each sample, shape (n,). Samples of an earlier selection come first.
        priority: The priorities of the samples of the earlier selection, shape (kept,), ``kept <= n``.
        generator: Random generator. One number is drawn from it.

    Returns:
        The positions of the selected samples, group by group, and a dict with their priorities as ``priority``.

    Example:
        >>> chosen, memory = sample_reservoirs(2, torch.tensor([0, 0, 1]), torch.zeros(0), torch.Generator())
        >>> sorted(chosen.tolist())[1], memory["priority"].shape
        (2, torch.Size([2]))
    """
    draws = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
    numbers, num_stored = groups.tolist(), len(priority)
    present, new = set(numbers[:num_stored]), dict.fromkeys(numbers[num_stored:])
    order = list(dict.fromkeys([*present, *new]))
    present.update(new.keys())
    # As in Avalanche, if the number of groups does not divide ``size``, the first groups get one more sample each.
    share, rest = divmod(size, len(present))
    shares = {group: share + (place < rest) for place, group in enumerate(present)}
    weights = torch.cat([priority, torch.zeros(len(numbers) - num_stored)])
    for group in new:
        rows = num_stored + (groups[num_stored:] == group).nonzero()[:, 0]
        weights[rows] = torch.rand(len(rows), generator=draws)
    rows_by_group = []
    for group in order:
        rows = (groups == group).nonzero()[:, 0]
        rows_by_group.append(rows[weights[rows].argsort(descending=True, stable=True)[: shares[group]]])
    positions = torch.cat(rows_by_group)
    return positions, {"priority": weights[positions]}


def _entries(data: Batch) -> StateSection:
    if isinstance(data, Mapping):
        return {f"{_SAMPLE}{name}": value for name, value in data.items()}
    return {"x": data[0], "y": data[1]}


def _are_classes(y: Tensor | None) -> bool:
    return y is not None and y.dim() == 1 and not y.is_floating_point()
