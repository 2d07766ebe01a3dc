"""A node of a deployment: trains one client on local data, and stores the client state on the local disk.

By default, Flower starts a process for each message, and each process imports torch and Lightning. `run_executor` runs
Flower's command ``flower-superexec``, but forks a process when Flower would start the command ``flwr-clientapp``.
`run_executor` uses no private module of Flower.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.deployment.messages import (
    LOST_STATE,
    MODEL,
    OTHER_ROUND,
    REQUIRED_FOR,
    SERVER,
    UNUSABLE_DATA,
    Parcel,
    RejectedMessageError,
    check_names,
    check_same,
    check_tensor,
    digest,
    refusal_of,
)
from lightning_fcl.deployment.node_data import DataSource, count_samples, read_data, set_node_data
from lightning_fcl.deployment.node_recipe import (
    ClientOutline,
    NodeRecipe,
    build_node_recipe,
    make_stream,
    recipe_fingerprint,
)
from lightning_fcl.deployment.upload_validation import HEADER_FIELDS, parse_file_name
from lightning_fcl.errors import DamagedFileError, InvalidStateError, LightningFCLError
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import ClientStore, trained_rounds
from lightning_fcl.federation.sent_once import kept_once
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Messages
from lightning_fcl.io.atomic import file_lock, write_atomic
from lightning_fcl.io.paths import cache_folder, safe_join
from lightning_fcl.io.reading import read_note
from lightning_fcl.simulation.client_group import ClientGroup
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.isolation import Isolation
from lightning_fcl.simulation.planning import plan_client_groups
from lightning_fcl.simulation.round import Round
from lightning_fcl.validation import format_code_names, require_package

log = logging.getLogger(__name__)

RECEIVED = "received"
"""Section of the client state that contains the tensors that the server sends to a client only once."""


class Node:
    """A node that trains one client on local data, and answers the server's messages.

    Args:
        recipe: The recipe, including all default values.
        client: Name of the client.
        data: Source of the client's data.
        folder: Folder of the client states. Default: a folder in the user's cache.
    """

    def __init__(
        self, recipe: Mapping[str, Any], client: str, data: str | DataSource, folder: str | Path | None = None
    ) -> None:
        self.client = client
        self._recipe = recipe
        self._data = (data if isinstance(data, DataSource) else DataSource(data)).with_recipe(recipe)
        self._folder = Path(folder) if folder is not None else cache_folder() / "nodes"
        self._print = recipe_fingerprint(recipe)

    def answer(self, parcel: Parcel) -> Parcel:
        """Return the answer to a message.

        If an error occurs, the answer contains the error's code. The text of the error is in the log.
        """
        head: dict[str, Any] = {"version": __version__, "recipe": self._print, "client": self.client}
        head |= {name: parcel.header.get(name) for name in HEADER_FIELDS}
        try:
            check_same(parcel.header, self._print, "the server")
            answers = {"hello": self._hello, "train": self._train}
            if parcel.header.get("kind") not in answers:
                raise RejectedMessageError(
                    f"Expected the `kind` of a message to be hello or train, but got {parcel.header.get('kind')!r}."
                )
            answer = answers[parcel.header["kind"]](parcel)
            return replace(answer, header={**head, **answer.header})
        except Exception as error:  # An error must not end this process. The server handles the error code.
            log_error(error, f"client {self.client}")
            return Parcel({**head, **refusal_of(error)})

    def _federation_folder(self, head: Mapping[str, Any]) -> Path:
        return client_folder(self._folder, parse_file_name(head, "federation"), self.client)

    def _hello(self, parcel: Parcel) -> Parcel:
        """Return a message with the number of the client's samples, and with a digest of tensors.

        The digest is of the initial values of the tensors that are neither uploaded nor downloaded.
        """
        federation_folder = self._federation_folder(parcel.header)
        seed = make_stream(self._recipe).seed
        with about_data():
            samples = count_samples(self._data, federation_folder / "data.json", seed)
        # The server names the tensors that are neither uploaded nor downloaded, and compares a digest of their values.
        names = parcel.header.get("held", [])
        state = state_tensors(build_node_recipe(self._recipe).module) if names else {}
        return Parcel({"samples": samples, "held": digest({name: state[name] for name in names})})

    def _train(self, parcel: Parcel) -> Parcel:
        """Train the client from the server's state. Return a message with the upload.

        If the client has too few samples in this round, the message has no tensors and the number of samples is 0.
        """
        head, outline, parts = (
            parcel.header,
            ClientOutline.from_dict(parcel.header["outline"]),
            build_node_recipe(self._recipe),
        )
        if outline.client != self.client:
            raise RejectedMessageError(
                f"Expected a message for client {self.client}, but got a message for client {outline.client}."
            )
        with about_data():
            set_node_data(parts.stream, read_data(self._data, parts.stream.seed), outline)
        if self.client not in parts.stream.plan.train[int(head["round"])]:
            return Parcel({"samples": 0})
        federation_folder = self._federation_folder(head)
        # If the SuperNode was disconnected earlier, an older process of this client can still be training.
        with file_lock(federation_folder / ".lock"):
            return train_client(
                parts, parcel.state, client_state_folder(federation_folder, self.client, int(head["round"])), head
            )


@contextmanager
def about_data() -> Iterator[None]:
    """Temporarily mark the library's errors as errors about the node's data.

    Errors without a specific code get the code ``UNUSABLE_DATA``.
    """
    try:
        yield
    except LightningFCLError as error:
        if error.code == RejectedMessageError.code:
            error.code = UNUSABLE_DATA
        error.argument = error.argument or "data"
        raise


def log_error(error: Exception, sender: str) -> None:
    """Log the text of an error. Add a traceback if the error is not a `LightningFCLError`."""
    unexpected = None if isinstance(error, LightningFCLError) else error
    log.error("Could not answer the server's message to %s: %s", sender, error, exc_info=unexpected)


class NodeServer(FederatedServer):
    """The server's state on a node. The upload of the client becomes the node's answer to the server.

    Attributes:
        trained: The client's round, if the client has trained. Otherwise empty.
        answer: The tensors of the upload, if they are finite. Otherwise empty.
    """

    def __init__(self, store: ClientStore, server: FederatedServer) -> None:
        super().__init__(store, server.client_weights, transforms=server.pipeline.transforms)
        self.trained = ClientRounds.from_rounds([])
        self.answer: State = {}

    def upload(
        self,
        client_rounds: Sequence[ClientRound],
        states: Mapping[str, Tensor],
        messages: Messages | None = None,
    ) -> list[bool]:
        """Encode the upload for the answer to the server. Return one flag: whether the upload is usable."""
        self.trained = (
            client_rounds if isinstance(client_rounds, ClientRounds) else ClientRounds.from_rounds(client_rounds)
        )
        uploads, is_accepted, _, _ = self.encode(self.trained, states, messages)
        if all(is_accepted):
            self.answer = {name: value.detach().clone() for name, value in uploads.client_tensors(0).items()}
        return is_accepted


class NodeRound(Round):
    """A round on a node. One client trains, and its upload is the node's answer to the server.

    Args:
        client: The client.
        head: The settings of the round, from the server's message.
        names: Names of the tensors that the node has received from the server.
        federation: The federation.
    """

    def __init__(self, client: str, head: Mapping[str, Any], names: Collection[str], federation: Federation) -> None:
        # Only one client trains in this process, so no state can reach a different client.
        federation.isolation = Isolation(type(federation.module).__name__)
        self._client, self._head, self._names = client, head, names
        super().__init__(federation, looks_ahead=False)

    def plan_groups(self) -> list[ClientGroup]:
        """Return one group with the client and its batches, or no group if the client has too few samples."""
        federation = self.federation
        if self._client not in federation.participation.candidates(federation.stream.plan, self.number):
            return []
        return plan_client_groups(federation, [[self._client]], self.number)

    def train_clients(self, client_group: ClientGroup | None) -> Generator[Any, None, None]:
        """Train the client with the server's optimizer settings."""
        if client_group is not None:
            self._check_received()
            groups = [group for optimizer in self.federation.optimizers for group in optimizer.param_groups]
            # Schedulers run on the server, so the node uses the server's current settings, such as the learning rate.
            for group, values in zip(groups, self._head["optimizer"], strict=True):
                group_settings = {
                    name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
                }
                group.update(group_settings)
        yield from super().train_clients(client_group)

    def aggregate(self) -> None:
        """Skip the aggregation, which runs on the server."""
        self.progress.client_group, self.progress.done = None, True

    def finish(self) -> None:
        """End the fit. The next round starts with another message."""
        self.federation.module.trainer.should_stop = True

    def _check_received(self) -> None:
        """Raise RejectedMessageError if the server did not send a tensor of the model, or the client lost a tensor."""
        server, received_names = self.federation.server, self._names
        if keys := [name for name in self._head["kept"] if name not in received_names]:
            raise RejectedMessageError(
                f"Expected client {self._client} to have stored {format_code_names(keys)}, but the client has lost "
                "this state. The server sends it again.",
                code=LOST_STATE,
            )
        download_names = [name for name, of in server.reductions.items() if of.is_downloaded and not of.once]
        if missing := [name for name in download_names if name not in received_names]:
            raise RejectedMessageError(
                f"Expected the server to send {format_code_names(missing)} of this recipe's model, but it did not.",
                hint="Deploy the same recipe on all machines.",
                code="other-model",
            )


def train_client(node_recipe: NodeRecipe, state: State, client_state: Path, header: Mapping[str, Any]) -> Parcel:
    """Train the only client of a stream for one round, as a simulation does. The Trainer runs one epoch.

    Args:
        node_recipe: New objects of the recipe.
        state: Tensors from the server.
        client_state: Folder of the client state. The state after this round replaces the state before this round.
        header: Header of the server's message.

    Returns:
        The upload, with the numbers of samples and replay samples in the header. If the client has too few samples, the
        result has no tensors.
    """
    server, (client,) = _receive(node_recipe, state, client_state), node_recipe.stream.plan.clients
    server.accepted = {client: int(header["accepted"])}
    names = {name.removeprefix(MODEL) for name in state} | server.extra_tensors.keys()
    number, strategy = int(header["round"]), node_recipe.strategy
    strategy.settings.max_vectorized_clients = 1
    strategy.is_new_round = partial(NodeRound, client, header, names)
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=node_recipe.callbacks,
        max_epochs=int(header["max_epochs"]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **node_recipe.trainer,
    )
    progress: Any = trainer.fit_loop.epoch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = number
    trainer.fit(node_recipe.module, datamodule=node_recipe.stream)
    if client not in strategy.federation.participation.candidates(node_recipe.stream.plan, number):
        return Parcel({"samples": 0})
    record, upload, trained = server.record, server.answer, server.trained
    if received_tensors := kept_once(server.extra_tensors, server.reductions):
        server.client_store.set_section(client, RECEIVED, received_tensors)
    server.client_store.sync()
    if not upload:
        raise RejectedMessageError(
            f"Expected a usable upload of client {client}, but got: {record.dropped.get(client, 'no upload')}."
        )
    samples, rehearsed = int(trained.num_samples[0]), int(trained.num_trained_samples[0] - trained.num_samples[0])
    return Parcel({"samples": samples, "rehearsed": rehearsed, "diverged": bool(record.diverged)}, upload)


def _receive(parts: NodeRecipe, state: State, state_folder: Path) -> NodeServer:
    """Load tensors from the server into the module. Return a `NodeServer` with the client's store."""
    module_state = state_tensors(parts.module)
    model, extra = (
        {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for prefix in (MODEL, SERVER)
    )
    check_names(model, model.keys() & module_state.keys(), "the server")
    for name, value in model.items():
        check_tensor(name, value, module_state[name], "the server")
        if not torch.isfinite(value).all() and torch.isfinite(module_state[name]).all():
            raise RejectedMessageError(
                f"Expected `{name}` of the server to be finite, but at least one of its values is non-finite."
            )
    load_state_tensors(parts.module, {**module_state, **model})
    federation = parts.strategy.federation
    store = ClientStore("disk", state_folder)
    stored_items = [value for client in store for value in store.get_section(client, RECEIVED).items()]
    federation.server = server = NodeServer(store, federation.server)
    server.extra_tensors = {**dict(stored_items), **extra}
    return server


def client_folder(folder: Path, federation: str, client: str) -> Path:
    """Create the folder of a client's state in a federation, and return it. Different names have different folders."""
    path = safe_join(folder, *(quote(name, safe="", errors="surrogatepass") for name in (federation, client)))
    path.mkdir(parents=True, exist_ok=True)
    return path


def client_state_folder(folder: Path, client: str, round_idx: int) -> Path:
    """Return the folder with a client's state from before a round. The state is restored if the round is repeated.

    The files are written in this order: the state before the round, the number of the round, the state after the round.
    Each file is flushed to the disk before the next file is written. If the file with the number is damaged, the number
    is computed from the states.

    Raises:
        DamagedFileError: If a damaged file is needed and cannot be computed again.
        RejectedMessageError: If the round is before the latest round that the client began.
    """
    current_store, previous_store = ClientStore("disk", folder / "now"), ClientStore("disk", folder / "before")
    note = folder / "round.json"
    try:
        last_round = read_note(note).get("round") if note.exists() else -1
        if not isinstance(last_round, int):
            last_round = _begun_round(current_store, previous_store, client, round_idx)
        if round_idx < last_round:
            raise RejectedMessageError(
                f"Expected a round number of at least {last_round}, the latest round that client {client} began, but "
                f"got {round_idx}.",
                hint="Start the server from its newest checkpoint.",
                code=OTHER_ROUND,
            )
        # Restore the state from before the round if the round is repeated or the current state is missing.
        if round_idx == last_round or (last_round >= 0 and client not in current_store):
            current_store[client] = previous_store[client]
        if round_idx > last_round:
            previous_store[client] = current_store[client]
            previous_store.sync()
            write_atomic(note, json.dumps({"round": round_idx}))
    except DamagedFileError as error:
        raise DamagedFileError(
            f"Expected valid files of client {client} in {folder}, but at least one file is damaged.",
            hint=f"Remove {folder}. The client then starts without the state that it kept.",
            value=folder,
        ) from error
    return folder / "now"


def _begun_round(current_store: ClientStore, previous_store: ClientStore, client: str, round_idx: int) -> int:
    """Return the latest round that a client began, from the client's states. The result is -1 if there are no states.

    This function is called if the file with the number of the latest round is damaged.
    """
    if client not in current_store:
        return round_idx if client in previous_store else -1
    trained = trained_rounds(current_store[client])
    if not trained or round_idx in trained_rounds(previous_store[client]):
        raise DamagedFileError(
            f"Expected to find the latest round of client {client} in its states, but it cannot be determined."
        )
    return trained[-1]


def preload_imports() -> None:
    """Import the packages that a client needs, so that forked processes need not import them again."""
    for name in ("flwr.app", "flwr.clientapp", "lightning_fcl.deployment.flower"):
        require_package(name, *REQUIRED_FOR)


def run_executor(words: Sequence[str]) -> None:
    """Run the command ``flower-superexec`` until it is stopped.

    Args:
        words: Arguments of the command.

    Raises:
        InvalidStateError: If the installed Flower lacks a command.
    """
    preload_imports()
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    superexec, ForkingPopen.run_client = read_command("flower-superexec"), staticmethod(read_command(_CLIENT))
    # Flower starts a client with the command `flwr-clientapp`. Flower looks up `subprocess.Popen` at each start.
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    # With this setting, the operating system removes ended child processes, and this process need not wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.argv = ["flower-superexec", *words]
    superexec()


_CLIENT = "flwr-clientapp"


def read_command(name: str) -> Callable[[], None]:
    """Return the function of a command of the installed Flower.

    Raises:
        InvalidStateError: If Flower does not have the command.
    """
    commands = list(entry_points(group="console_scripts", name=name))
    if not commands:
        raise InvalidStateError(
            f"Expected Flower to have the command `{name}`, but flwr {version('flwr')} does not.",
            hint='Install a supported version: pip install "lightning-fcl[flower]".',
        )
    command: Callable[[], None] = commands[0].load()
    return command


class ForkingPopen(subprocess.Popen[Any]):
    """A `subprocess.Popen` that forks this process to start a Flower client. Other programs start as usual.

    The forked process has already imported all packages.

    Attributes:
        run_client: The function of Flower's command for a client.
    """

    run_client: Callable[[], None]

    def __init__(self, args: Any, *popen_args: Any, **options: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list | tuple) else []
        if not words or os.path.basename(words[0]) != _CLIENT:
            super().__init__(args, *popen_args, **options)
            return
        self.args, self.pid, self.returncode = args, os.fork(), None
        if self.pid == 0:
            self._run(words)

    def _run(self, words: list[str]) -> NoReturn:
        """Run a client in the forked process, and exit the process."""
        try:
            exit_with_parent()
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            sys.argv = words
            type(self).run_client()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Exit without the exit handlers that the process inherited by the fork.
            os._exit(0)


def exit_with_parent() -> None:
    """Start a thread that exits this process about 10 s after the parent process has ended.

    Without this thread, a process of Flower would wait for a SuperLink that has stopped.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(10.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
