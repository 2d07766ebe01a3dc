"""A recipe as a Flower app: the files of the app, and the client and server apps based on Flower's Message API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fcl import __version__
from lightning_fcl.deployment.messages import (
    MAX_BYTES,
    REQUIRED_FOR,
    GridLink,
    Parcel,
    RejectedMessageError,
    refusal_of,
    to_record,
    unpack,
)
from lightning_fcl.deployment.node import Node, log_error
from lightning_fcl.deployment.node_data import DataSource, split_file
from lightning_fcl.deployment.node_recipe import build_node_recipe, read_recipe, recipe_fingerprint
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.validation import require_package

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp


RECIPE = "recipe.yaml"
"""Name of the recipe file in the folder of an app."""

_INIT = "init_args."
"""Prefix of the names of a data module's arguments in a node config or a run configuration."""

_SIDES = {
    "client": "Flower client app: train the recipe in this folder on the data that the node config names.",
    "server": "Flower server app: run the recipe in this folder with clients that train on nodes.",
}
_APP = '''"""{what}"""

from pathlib import Path

from lightning_fcl.deployment.flower import {side}_app

app = {side}_app(Path(__file__).parent)
'''


def write_app(recipe: Mapping[str, Any], folder: Path, name: str, publisher: str = "lightning-fcl") -> list[Path]:
    """Write a Flower app for a recipe to a folder. Return the paths of the files.

    Args:
        recipe: The recipe, including all default values.
        folder: Folder of the app.
        name: Name of the app.
        publisher: Name of the app's publisher, for Flower.

    Raises:
        InvalidValueError: If the recipe has settings that only a simulation supports.
    """
    from lightning_fcl.deployment.deployment_server import DeploymentConfig, check_deployable
    from lightning_fcl.runs.paper_rows import slug

    parts = build_node_recipe(recipe)
    methods = [callback for callback in parts.callbacks if isinstance(callback, MethodBase)]
    check_deployable(parts.strategy.federation.participation, parts.strategy.server.pipeline, methods)
    folder.mkdir(parents=True, exist_ok=True)
    project = read_text(Path(__file__).with_name("app.toml"))
    project = project.format(
        name=slug(name) or "app",
        publisher=publisher,
        fingerprint=recipe_fingerprint(recipe),
        version=__version__,
        terms=DeploymentConfig(),
    )
    texts = {RECIPE: yaml.safe_dump(dict(recipe), sort_keys=False), "pyproject.toml": project}
    texts |= {f"{side}_app.py": _APP.format(side=side, what=what) for side, what in _SIDES.items()}
    return [write_atomic(folder / file, text) for file, text in texts.items()]


def client_app(folder: Path) -> ClientApp:
    """Return the Flower app of a node.

    The node config contains the name of the ``client`` and the location of its ``data``. Optional entries are the
    ``target`` and ``features`` of a table, and the arguments of a data module as ``init_args.NAME``. The optional entry
    ``state-dir`` is the folder of the client states. Flower's simulation does not set these entries. For the nodes of a
    simulation, the run configuration contains the names of the ``clients`` and the ``data-folder`` of their files.

    Args:
        folder: Folder of the app, which contains the recipe.
    """
    app: ClientApp = require_package("flwr.clientapp", *REQUIRED_FOR).ClientApp()
    # The recipe can name classes in files of this folder.
    sys.path.append(str(folder))
    # At the default level, Lightning logs in each round which accelerators are available.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    def answer(message: Message, context: Context) -> Message:
        try:
            node = Node(read_recipe(folder / RECIPE), *_read_node_config(context))
            answer_parcel = node.answer(
                unpack(message.content, int(context.run_config.get("max-message-bytes", MAX_BYTES)))
            )
        except ValueError as error:
            log_error(error, "this node")
            answer_parcel = Parcel(refusal_of(error))
        reply: Message = require_package("flwr.app", *REQUIRED_FOR).Message(to_record(answer_parcel), reply_to=message)
        return reply

    app.query()(answer)
    app.train()(answer)
    return app


def _read_node_config(context: Context) -> tuple[str, DataSource, str | None]:
    """Return the client of a node, the data source, and the folder of the client states (None: the default folder)."""
    node, run = context.node_config, context.run_config
    names, number = _names(run.get("clients", "")), node.get("partition-id")
    client = str(node.get("client", ""))
    if not client and isinstance(number, int) and number < len(names):
        client = names[number]
    if not client:
        raise RejectedMessageError(
            f"Expected a node config that names the client and its data, but got {dict(node)}.",
            hint="""Start the node with --node-config 'client="a" data="a.npz"'. """
            "In Flower's simulation, set `clients` in the run configuration to the names of all clients.",
            argument="client",
            code="unnamed-client",
        )
    data = node.get("data") or split_file(Path(str(run.get("data-folder", ""))), client)
    state_folder = node.get("state-dir") or run.get("state-dir") or None
    return client, _source(str(data), node, run), None if state_folder is None else str(state_folder)


def _source(data: str, *configs: Mapping[str, Any]) -> DataSource:
    """Return a data source with the columns and arguments in ``configs``. Earlier configurations have priority."""
    config_values = {name: value for config in reversed(configs) for name, value in config.items() if value != ""}
    table: dict[str, Any] = {
        name: _names(config_values[name]) for name in ("target", "features") if name in config_values
    }
    init_args = {name.removeprefix(_INIT): value for name, value in config_values.items() if name.startswith(_INIT)}
    return DataSource(data, table, init_args)


def _names(names_text: object) -> list[str]:
    """Return the names in a comma-separated text."""
    return [name.strip() for name in str(names_text).split(",") if name.strip()]


def log_to_stderr() -> None:
    """Write the library's log messages to standard error, which `flwr run --stream` shows."""
    logger, handler = logging.getLogger("lightning_fcl"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def server_app(folder: Path) -> ServerApp:
    """Return the Flower app of the server.

    The run configuration contains these entries:

    - ``out``, the folder of results and checkpoints. A run resumes from the newest checkpoint in this folder.
    - ``data``, the test data of the server, with the ``target`` and ``features`` of a table.
    - ``clients``, the names of the clients. Required with ``data``.
    - the fields of `DeploymentConfig`, with hyphens in place of underscores.

    Args:
        folder: Folder of the app, which contains the recipe.
    """
    app: ServerApp = require_package("flwr.serverapp", *REQUIRED_FOR).ServerApp()
    sys.path.append(str(folder))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from lightning_fcl.deployment.deployment_server import DeploymentConfig, serve
        from lightning_fcl.deployment.node import exit_with_parent

        exit_with_parent()
        settings = {name.replace("-", "_"): value for name, value in context.run_config.items()}
        terms = {
            name: type(value)(settings[name]) for name, value in vars(DeploymentConfig()).items() if name in settings
        }
        log_to_stderr()
        out, data = Path(str(settings.get("out", "runs/deployed"))), str(settings.get("data", ""))
        source = _source(data, context.run_config) if data else None
        serve(
            folder / RECIPE, GridLink(grid), out, DeploymentConfig(**terms), source, _names(settings.get("clients", ""))
        )

    return app
