"""The server of a deployment: `lightning-fcl fit` of a recipe whose clients train on nodes."""

from __future__ import annotations

import logging
import time
import uuid
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fcl import __version__
from lightning_fcl.callbacks import ContinualMetrics, PredictionWriter
from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.deployment.messages import (
    MAX_BYTES,
    MODEL,
    OTHER_ROUND,
    SERVER,
    Parcel,
    RejectedMessageError,
    digest,
)
from lightning_fcl.deployment.node_data import DataSource, read_data, set_server_data
from lightning_fcl.deployment.node_recipe import make_outline, read_recipe, recipe_fingerprint
from lightning_fcl.deployment.node_registry import NodeRegistry
from lightning_fcl.deployment.resuming import LastCheckpoint, check_no_round_missing
from lightning_fcl.deployment.upload_validation import MAX_INTEGER, UploadLimits, decode_upload, parse_upload
from lightning_fcl.errors import InvalidStateError, InvalidValueError, MissingValueError
from lightning_fcl.evaluation.results import LAST
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.protocols import RoundEndListener
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.synchronization import Participation, Poisson
from lightning_fcl.io.checkpoint import newest_checkpoint
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.privacy.transforms import PrivateTransform
from lightning_fcl.runs.federated_cli import FederatedCLI, as_list
from lightning_fcl.runs.fit import run_cli
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.simulation.client_group import ClientGroup
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.round import Round
from lightning_fcl.simulation.strategy import FederatedStrategy
from lightning_fcl.validation import above, at_least, format_names, validate_fields, validated

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from lightning_fcl.deployment.messages import GridLink

log = logging.getLogger(__name__)

# The server warns about a client with more than this multiple of the median number of samples.
_FAR_MORE = 100


@dataclass(frozen=True)
class DeploymentConfig:
    """Settings of a deployment's server.

    Args:
        min_clients: Number of clients whose uploads a round needs. A round with fewer sampled clients needs the uploads
            of all of them.
        round_timeout: Seconds after which a round with enough uploads no longer waits for other clients.
        join_timeout: Maximum waiting time in seconds until ``min_clients`` clients have joined. A round with missing
            uploads also waits for at most this time after ``round_timeout``.
        max_message_bytes: Maximum total size of the tensors in a message, in bytes.
        max_samples: Maximum number of samples of a client in a round. 0: the number that the client reported when it
            joined.
        max_update_norm: Maximum norm of a client's update, as a multiple of the larger of 1 and the norm of the
            server's averaged tensors. The same limit applies to the change of the server's model in a round.
        require_registered_keys: Whether the SuperLink only admits nodes with registered keys. If True, a client name
            belongs to the first key that claims the name. Use False if keys are not registered: Flower then gives a
            SuperNode a new key at each start, so a restarted node could not join again.
    """

    min_clients: int = validated(1, at_least, 1)
    round_timeout: float = validated(600.0, at_least, 0)
    join_timeout: float = validated(600.0, at_least, 0)
    max_message_bytes: int = validated(MAX_BYTES, at_least, 1)
    max_samples: int = validated(0, at_least, 0)
    max_update_norm: float = validated(1000.0, above, 0)
    require_registered_keys: bool = False

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass
class FederationIdentity(Callback):
    """A callback that saves the identity of a federation in the checkpoints of the server.

    Args:
        name: Name of the folder in which nodes store their state for this federation.
        claimed_clients: Name of the client that each key belongs to, by the hash of the key.
        behind: The latest round that a client rejected because the client's stored state is from a later round, by
            client.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    claimed_clients: dict[str, str] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "claimed": {**self.claimed_clients}, "behind": {**self.behind}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.name = str(state_dict["name"])
        self.claimed_clients.update(state_dict["claimed"])
        self.behind.update(state_dict.get("behind", {}))


class ServerRound(Round):
    """A round of a deployment's server. The clients train on the nodes.

    Args:
        nodes: The nodes.
        federation: The federation.
    """

    def __init__(self, nodes: NodePool, federation: Federation) -> None:
        super().__init__(federation)
        self._nodes = nodes

    def plan_groups(self) -> list[ClientGroup]:
        """Return no groups, because no client trains in this process."""
        return []

    def train_clients(self, client_group: ClientGroup | None) -> Generator[Any, None, None]:
        """Send the server's state to the sampled clients, and accumulate the uploads. Yield None as the only batch."""
        federation = self.federation
        if federation.isolation is not None:
            federation.isolation.refuse_gathered()
        self._began = time.monotonic()
        sampled_clients, self.no_data = federation.participation.sample_on_time_clients(
            federation.stream.plan, self.number
        )
        self._counts = self._nodes.gather(federation, self.number, sampled_clients, self.no_data), len(sampled_clients)
        federation.counters.count_steps(federation.module.trainer, 1)
        yield None

    def finish(self) -> None:
        super().finish()
        rounds, seconds = self.federation.module.trainer.max_epochs, time.monotonic() - self._began
        log.info(
            "Round %d ended with answers of %d of %d sampled clients after %.1f s. The run has %s rounds.",
            *(self.number, *self._counts, seconds, rounds),
        )


class NodePool:
    """The nodes of a deployment.

    Args:
        link: Connection to the nodes.
        recipe: Fingerprint of the recipe.
        terms: Settings of the server.
    """

    def __init__(self, link: GridLink, recipe: str, terms: DeploymentConfig) -> None:
        self.recipe, self.config = recipe, terms
        self.identity = FederationIdentity()
        waits = terms.round_timeout, terms.join_timeout
        self.members = NodeRegistry(link, recipe, *waits, self.identity.claimed_clients, terms.require_registered_keys)

    def gather(self, federation: Federation, number: int, sampled_clients: Sequence[str], no_data: list[str]) -> int:
        """Send the server's state to the sampled clients, and accumulate their uploads.

        Args:
            federation: The federation.
            number: Number of the round.
            sampled_clients: The sampled clients.
            no_data: List to which the clients without samples in this round are added.

        Returns:
            The number of accepted answers, including answers of clients without samples.

        Raises:
            InvalidStateError: If too few clients answer.
        """
        server = federation.server
        # Tensors of the module that are neither downloaded nor uploaded. Each client starts from the initial values.
        module_reductions = {n: rule for n, rule in server.reductions.items() if n not in server.extra_tensors}
        untransferred_state = {
            n: server.state[n] for n, rule in module_reductions.items() if not (rule.is_downloaded or rule.is_uploaded)
        }
        hello = {**self._head(federation, number), "kind": "hello", "held": sorted(untransferred_state)}
        self.members.start_round(hello, digest(untransferred_state), federation.stream.plan.clients)
        log.info("Round %d began. Number of sampled clients: %d.", number, len(sampled_clients))

        def take(client: str, answer: RecordDict, sent_header: Mapping[str, Any]) -> bool:
            if client in server.record.accepted:
                _drop(server, number, client, "a second answer, which the server ignored")
                return True
            try:
                return self._take(federation, number, client, answer, sent_header, len(sampled_clients), no_data)
            except RejectedMessageError as error:
                if error.code == OTHER_ROUND:
                    self.identity.behind[client] = number
                _drop(server, number, client, str(error))
                return False

        min_answers, sent_to = (
            min(self.config.min_clients, len(sampled_clients)),
            partial(self._sent_to, federation, number, untransferred_state),
        )
        for client, reason in self.members.collect_answers(sampled_clients, min_answers, sent_to, take).items():
            _drop(server, number, client, reason)
        self._record_limits(server.record, sampled_clients)
        server.record.duplicate_claims = self.members.duplicate_claims
        num_accepted = self.members.num_accepted_answers
        ending = "" if min_answers == 1 else "s"
        fewer = f"Expected uploads of at least {min_answers} client{ending} in round {number}, but got {num_accepted} ("
        fewer += "; ".join(f"{client}: {why}" for client, why in server.record.dropped.items())
        if not self.members.has_enough_answers:
            raise InvalidStateError(
                f"{fewer}).",
                hint="Start the nodes of these clients, or fix the reported problems, and then start the server again. "
                "The server resumes from its newest checkpoint, if any.",
            )
        if num_accepted < min_answers:
            log.warning("%s). The run continues.", fewer)
        return num_accepted

    def close(self, out: Path) -> None:
        """Log where the results are, or raise an error if the results lack uploads of a client.

        Raises:
            InvalidStateError: If the stored state of a client was from a later round than the server.
        """
        clients = self.identity.behind
        if not clients:
            log.info("Finished the run. The results are in %s.", out)
            return
        raise InvalidStateError(
            f"Expected no client to be ahead of the server, but the state of {format_names(clients)} is from a later "
            f"round. The results in {out} lack some uploads of rounds up to {max(clients.values())}.",
            hint="Restore the newest checkpoint of the run, or choose another `out` to start a new run.",
        )

    def _head(self, federation: Federation, number: int) -> dict[str, Any]:
        return {
            "version": __version__,
            "recipe": self.recipe,
            "federation": self.identity.name,
            "round": number,
            "max_epochs": federation.module.trainer.max_epochs,
            "message": uuid.uuid4().hex,
            "optimizer": [_plain(group) for o in federation.optimizers for group in o.param_groups],
        }

    def _sent_to(
        self, federation: Federation, number: int, untransferred_state: State, client: str, node: int
    ) -> Parcel:
        """Return the message to a client: the downloaded tensors, and the initial values of other module tensors.

        The other module tensors are neither downloaded nor uploaded.

        The initial values are left out if the node has the same values already. Tensors that are sent to a client only
        once are left out if the client has these tensors already.
        """
        server, outline = federation.server, make_outline(federation.stream, client)
        once_entries = server.sent_once
        omitted = once_entries.sizes.keys() - once_entries.missing(client)
        download = {n: v for n, v in server.state.items() if server.reductions[n].is_downloaded and n not in omitted}
        state = {f"{SERVER if n in server.extra_tensors else MODEL}{n}": v for n, v in download.items()}
        state |= (
            {} if node in self.members.compatible_nodes else {f"{MODEL}{n}": v for n, v in untransferred_state.items()}
        )
        server.record.add_download_bytes(client, sum(value.nbytes for value in state.values()))
        client_fields = {"accepted": server.accepted.get(client, -1), "kept": once_entries.received_names(client)}
        head = {**self._head(federation, number), "kind": "train", "outline": asdict(outline), **client_fields}
        return Parcel(head, state)

    def _take(
        self,
        federation: Federation,
        number: int,
        client: str,
        answer: RecordDict,
        sent_header: Mapping[str, Any],
        num_sampled_clients: int,
        no_data: list[str],
    ) -> bool:
        """Validate and accumulate the answer of a client. Return whether the answer is accepted.

        Args:
            federation: The federation.
            number: Number of the round.
            client: The client.
            answer: The answer of the client.
            sent_header: Header of the message that the client answers.
            num_sampled_clients: Number of the sampled clients in this round.
            no_data: List to which the client is added if it has no samples in this round.

        Raises:
            RejectedMessageError: If the answer is invalid.
        """
        server = federation.server
        terms, max_samples = self.config, self.config.max_samples or self.members.samples[client]
        rehearsed = max_samples if server.client_weights == "trained_samples" else MAX_INTEGER
        server_state = {name: value for name, value in server.state.items() if server.reductions[name].is_uploaded}
        limits = UploadLimits(
            terms.max_message_bytes, max_samples, rehearsed, terms.max_update_norm, num_sampled_clients
        )
        upload = parse_upload(answer, sent_header, client, server_state, limits)
        if upload.num_samples == 0:
            no_data.append(client)
            return True
        client_rounds = ClientRounds(
            number,
            [client],
            np.array([upload.num_samples]),
            lambda name: federation.stream.client_round(name, number),
            np.array([upload.num_replay_samples]),
        )
        (is_accepted,) = server.accept(decode_upload(upload, server, client_rounds, limits))
        if is_accepted:
            server.record.upload_bytes[client] = upload.nbytes
            server.record.diverged += [client] * upload.has_diverged
        return is_accepted

    def _record_limits(self, record: RoundRecord, clients: Sequence[str]) -> None:
        """Record the limits of uploads in the record of the round.

        If ``max_samples`` is 0, warn if a client reports far more samples than the median of the clients.
        """
        samples = {client: self.members.samples[client] for client in clients if client in self.members.samples}
        usual = _FAR_MORE * median_low(samples.values() or [0])
        for client, number in samples.items():
            if number > usual and not self.config.max_samples:
                log.warning(
                    "Client %s reports %d samples, more than %d times the median of the clients. This number can "
                    "become the weight of the client in means. If the number is wrong, set `max-samples` in the run "
                    "configuration.",
                    client,
                    number,
                    _FAR_MORE,
                )
        largest = self.config.max_samples or max(samples.values(), default=0)
        record.upload_limits = {"max_samples": largest, "max_update_norm": self.config.max_update_norm}


def _drop(server: FederatedServer, number: int, client: str, reason: str) -> None:
    server.sent_once.forget(client)
    server.record.dropped.setdefault(client, reason)
    log.warning("Round %d: problem with client %s: %s", number, client, reason)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter group as plain values, without the parameters."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in group.items()
        if isinstance(value, int | float | str | tuple | None) and name != "params"
    }


def check_deployable(participation: Participation, pipeline: Pipeline, methods: Sequence[MethodBase]) -> None:
    """Raise InvalidValueError for settings and methods that only a simulation supports."""
    for transform in {*pipeline.exchanges, *([] if pipeline.mask is None else [pipeline.mask])}:
        raise InvalidValueError(
            f"Expected no `{type(transform).__name__}` in a deployment, because a node sends one message per round and "
            "the server decodes each upload.",
            hint="Use `lightning-fcl fit` to simulate the federation.",
            argument="upload_transforms",
            value=type(transform).__name__,
        )
    if any(isinstance(one, PrivateTransform) for one in pipeline.transforms):
        raise InvalidValueError(
            "Expected no `privacy` in a deployment, because every node could compute the noise from the seed of the "
            "recipe.",
            hint="Use `lightning-fcl fit` to simulate the federation.",
            argument="privacy",
        )
    sampling = participation.fraction_or_count
    for name, setting, reason in (
        (
            "participation",
            sampling if isinstance(sampling, Poisson) else None,
            "because its nodes could compute the sampled clients from the seed of the recipe",
        ),
        ("swarm", participation.swarm, "because the nodes of a deployment exchange messages only with the server"),
        (
            "synchronization",
            participation.synchronization,
            "because a deployment does not simulate the time of clients and ends a round after `round-timeout`",
        ),
    ):
        if setting is not None:
            raise InvalidValueError(
                f"Expected no `{name}` in a deployment, {reason}, but got a `{type(setting).__name__}`.",
                hint=f"Leave `{name}` out.",
            )
    for method in methods:
        if isinstance(method, RoundEndListener):
            raise InvalidValueError(
                f"Expected methods that do not read client states at the end of a round, but got "
                f"`{type(method).__name__}`. In a deployment, client states stay on the nodes, so only a simulation "
                "can run this method.",
                hint="Use `lightning-fcl fit` for this method.",
            )


def serve(
    recipe: Path,
    link: GridLink,
    out: Path,
    terms: DeploymentConfig,
    data: str | DataSource | None = None,
    clients: Sequence[str] = (),
) -> FederatedCLI:
    """Run the server of a deployment until the last round. Resume from the newest checkpoint in ``out``, if any.

    Args:
        recipe: File of the recipe that `lightning-fcl deploy flower` has written.
        link: Connection to the nodes.
        out: Folder of the results and checkpoints.
        terms: Settings of the server.
        data: Test data of the server, see `DataSource`. Default: the test samples of the recipe's data.
        clients: Names of the clients. Required with ``data``.

    Returns:
        The object that ran the fit.

    Raises:
        InvalidStateError: If too few clients join or answer, or if the newest checkpoint lacks rounds of the record.
            Also after the last round, if the stored state of a client was from a later round than the server.
        MissingValueError: If ``data`` is given without ``clients``.
    """
    if data is not None and not clients:
        raise MissingValueError(
            "Expected `clients` together with `data`, because the server's data does not name the clients, but got "
            "no `clients`.",
            hint='Set `clients` in the run configuration, for example clients="a,b,c".',
        )

    nodes = NodePool(link, recipe_fingerprint(read_recipe(recipe)), terms)

    class Served(FederatedCLI):
        """A `FederatedCLI` that starts the server's fit. The clients train on nodes."""

        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            callbacks = as_list(self.config_init["fit"]["trainer"]["callbacks"])
            has_own = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
            trainer = super().instantiate_trainer(**kwargs)
            strategy, callbacks = trainer.strategy, get_callbacks(trainer)
            assert isinstance(strategy, FederatedStrategy)
            check_deployable(strategy.federation.participation, strategy.server.pipeline, get_methods(trainer))
            for callback in callbacks:
                if isinstance(callback, PredictionWriter):
                    callback.clients = "none"
                if isinstance(callback, ContinualMetrics):
                    # Client models and training samples stay on the nodes, so the server cannot evaluate them.
                    callback.clients, callback.evaluate_on_train = "none", False
            strategy.settings.max_vectorized_clients = 1
            # A client with unusable uploads must not end the run.
            strategy.settings.stops_unusable = False
            strategy.server.max_update_norm = terms.max_update_norm
            strategy.is_new_round = partial(ServerRound, nodes)
            callbacks.append(nodes.identity)
            if has_own:
                callbacks.append(LastCheckpoint(out / LAST))
            return trainer

        def fit(self, model: L.LightningModule, **arguments: Any) -> None:
            if data is not None:
                source = (data if isinstance(data, DataSource) else DataSource(data)).with_recipe(read_recipe(recipe))
                set_server_data(self.datamodule, read_data(source, self.datamodule.seed, for_server=True), clients)
            super().fit(model, **arguments)

    # Clients train on the nodes, so the training step of the server's Trainer returns None.
    warnings.filterwarnings("ignore", "`training_step` returned `None`")
    values = {"out": str(out), "trainer.enable_progress_bar": False, "trainer.enable_checkpointing": True}
    whole, newest = Recipe((recipe,)).with_values(values), newest_checkpoint(out / LAST.parent)
    check_no_round_missing(out, newest)
    if newest is not None:
        log.info("Resumed from %s.", newest)
        whole = whole.with_values({"ckpt_path": str(newest)})
    served = run_cli("fit", whole, Served)
    nodes.close(out)
    return served
