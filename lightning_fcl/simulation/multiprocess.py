"""Training of one federation in several processes. Lightning launches them as for DDP, and gloo connects them.

Each rank runs the whole Trainer with the same stream, methods and server, but trains different clients. Ranks
communicate before and after the local training of a round. While clients train, ranks do not communicate.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import lightning.pytorch as L
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.ranks import SINGLE_RANK, Ranks
from lightning_fcl.io.atomic import TemporaryFolder
from lightning_fcl.simulation.checkpoint_io import AtomicCheckpointIO
from lightning_fcl.simulation.gloo import RENDEZVOUS_VARIABLE, GlooRanks, connect_ranks
from lightning_fcl.validation import differing_values, one_of

T = TypeVar("T")

_MOST = max(64, 4 * (os.cpu_count() or 1))  # maximum number of processes on one machine
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def check_processes(environment: ClusterEnvironment, processes: int, nodes: int) -> None:
    """Raise ValueError if a machine has too many processes, or if several machines cannot connect.

    Without a cluster environment, the machines connect through MASTER_ADDR, MASTER_PORT and NODE_RANK.
    """
    if processes > _MOST:
        raise InvalidValueError(
            f"Expected at most {_MOST} `devices` on this machine, because each device is a process, but got "
            f"{processes}.",
            hint="Set `devices` to the number of CPU cores or less.",
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if nodes > 1 and missing and isinstance(environment, LightningEnvironment):
        raise InvalidValueError(
            f"Expected MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment of each of `num_nodes={nodes}` "
            f"machines, but these are missing: {', '.join(missing)}. Without these variables the machines cannot "
            "connect.",
            hint="Set the missing variables as described in docs/scale.md, or remove `num_nodes`.",
        )


class _Meets:
    """A launcher that sets the rendezvous file with which the processes of this machine connect."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "LOCAL_RANK" not in os.environ:
            self._folder = TemporaryFolder("ranks")
            os.environ[RENDEZVOUS_VARIABLE] = f"file://{self._folder.path / 'meeting'}"
        return super().launch(function, *args, **kwargs)  # type: ignore[misc]


class _Scripts(_Meets, _SubprocessScriptLauncher):
    pass


class _Processes(_Meets, _MultiProcessingLauncher):
    """A launcher that also returns the states of the first process's callbacks to the main process."""

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        extra_results = super().get_extra_results(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            content = io.BytesIO()
            torch.save({callback.state_key: callback.state_dict() for callback in get_callbacks(trainer)}, content)
            extra_results["callbacks"] = content.getvalue()
        return extra_results

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        states = torch.load(io.BytesIO(extra["callbacks"]), weights_only=True) if "callbacks" in extra else {}
        for callback in get_callbacks(trainer):
            if states.get(callback.state_key):
                callback.load_state_dict(states[callback.state_key])


class RanksStrategy(ParallelStrategy):
    """The part of a strategy that starts and connects processes. One device on one machine needs only one process.

    The `world_size` is always 1, so that the Trainer's loops do not synchronize at every batch. While hooks for a
    client's batches run, the strategy reports a single process. A client's upload then does not depend on the number of
    processes.

    Args:
        accelerator: As in Lightning's strategies.
        checkpoint_io: As in Lightning's strategies.
        precision_plugin: As in Lightning's strategies.
        start_method: How further processes are started if there are several devices, as in Lightning's `DDPStrategy`.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        start_method: StartMethod,
    ) -> None:
        self.shows_one_process = False  # whether the properties below report a single process
        super().__init__(accelerator, None, None, checkpoint_io, precision_plugin)
        one_of(("popen", "spawn", "fork", "forkserver"), start_method=start_method)
        self.num_nodes = 1
        self.start_method = start_method
        self.ranks: Ranks = SINGLE_RANK

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that reads and writes checkpoints. By default, checkpoints are written atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def num_nodes(self) -> int:
        """Number of machines. The number is 1 while hooks for a client's batches run."""
        return 1 if self.shows_one_process else self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return [self.root_device] if self.shows_one_process else self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or [()])

    @property
    def expected(self) -> int:
        """Number of ranks in the whole federation. The number is 1 while hooks for a client's batches run."""
        return self.num_nodes * self.num_processes

    @property
    def world_size(self) -> int:
        return 1

    @property
    def global_rank(self) -> int:
        return super().global_rank if self.expected > 1 else 0

    @property
    def local_rank(self) -> int:
        return super().local_rank if self.expected > 1 else 0

    @property
    def node_rank(self) -> int:
        return 0 if self.shows_one_process else super().node_rank

    @property
    def root_device(self) -> torch.device:
        devices = self._parallel_devices or [torch.device("cpu")]
        return devices[super().local_rank if len(devices) > 1 else 0]

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if self.expected > 1 and environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.expected)
            vars(rank_zero_only)["rank"] = self.global_rank

    def _configure_launcher(self) -> None:
        if self.expected == 1 or self.cluster_environment is None:
            return
        check_processes(self.cluster_environment, self.num_processes, self.num_nodes)
        if self.start_method == "popen":
            self._launcher = _Scripts(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _Processes(self, start_method=self.start_method)

    def setup_environment(self) -> None:
        super().setup_environment()
        environment = self.cluster_environment
        if self.expected == 1 or environment is None:
            return
        self.set_world_ranks()
        if self.root_device.type == "cpu":
            torch.set_num_threads(1)  # With small models, the threads of several processes slow each other down.
        if self.ranks.num_ranks == 1:
            self.ranks = connect_ranks(environment, self.global_rank, self.expected, self.num_nodes)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all processes, for logging with ``sync_dist=True``. The default is the mean.

        Values that are not tensors are returned unchanged.
        """
        if self.ranks.num_ranks == 1 or not isinstance(tensor, Tensor):
            return tensor
        values = torch.stack([value.to(tensor.device) for value in self.ranks.all_gather_object(tensor.detach().cpu())])
        if _name(reduce_op) in ("mean", "avg"):
            return values.double().mean(dim=0).to(tensor.dtype if tensor.is_floating_point() else torch.float32)
        by_name: dict[str, Callable[[int], Tensor]] = {"sum": values.sum, "max": values.amax, "min": values.amin}
        return by_name[_name(reduce_op)](0).to(tensor.dtype)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - the name of the argument in Lightning
        """Return whether the decision is true in all processes, or in any process if ``all`` is False."""
        decisions = self.ranks.all_gather_object(bool(decision))
        return False not in decisions if all else True in decisions

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.ranks.all_gather_object(None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.ranks.all_gather_object(obj if self.ranks.rank == src else None)[src]  # type: ignore[return-value]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, shape (processes, ...). With one process, return the tensor itself."""
        if self.ranks.num_ranks == 1:
            return tensor
        return torch.stack([value.to(tensor.device) for value in self.ranks.all_gather_object(tensor.detach().cpu())])

    def on_exception(self, exception: BaseException) -> None:
        """Close the connection, so that the other processes stop waiting for this process."""
        super().on_exception(exception)
        if isinstance(self.ranks, GlooRanks):
            self.ranks.close()
        self.ranks = SINGLE_RANK


def _name(reduce_op: Any) -> str:
    return str(reduce_op).lower().rsplit(".", maxsplit=1)[-1]


def check_same_federation(ranks: Ranks, fingerprint: Mapping[str, object]) -> None:
    """Raise ValueError if processes have different package versions, settings or data.

    Args:
        ranks: The processes.
        fingerprint: The values that must be equal in all processes, by name.
    """
    local_fingerprint = {"version of lightning-fcl": __version__, "version of torch": torch.__version__, **fingerprint}
    first, *other_fingerprints = ranks.all_gather_object(local_fingerprint)
    for rank, other in enumerate(other_fingerprints, 1):
        for name, first_value, other_value in differing_values(first, other):
            raise InvalidValueError(
                f"Expected all processes of a federation to have the same `{name}`, but process {rank} has "
                f"{other_value} and the first process has {first_value}.",
                hint="Start all processes with the same recipe, data and package versions.",
            )
