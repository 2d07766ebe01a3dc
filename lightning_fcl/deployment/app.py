"""A Flower app of a recipe: a folder with four files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_fcl import __version__
from lightning_fcl.deployment.recipe import build, fingerprint
from lightning_fcl.deployment.server import Terms, check_deployable
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.methods.declaration import Declaration

_CLIENT = '''"""What a node runs: the recipe beside this file, on the data that its node config names."""

from pathlib import Path

from lightning_fcl.deployment.flower import client_app

app = client_app(Path(__file__).parent)
'''

_SERVER = '''"""What the server runs: the recipe beside this file, whose rounds come from nodes."""

from pathlib import Path

from lightning_fcl.deployment.flower import server_app

app = server_app(Path(__file__).parent)
'''

_PROJECT = """# A Flower app of lightning-fcl, for `flwr run`. The recipe, {fingerprint}, is beside this file.

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of lightning-fcl"
license = "Apache-2.0"
dependencies = ["lightning-fcl[flower]=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

# Each can be set for a run: flwr run . --run-config 'clients-at-least=3'.
[tool.flwr.app.config]
out = "runs/{name}"  # folder of results and checkpoints, at the server; from the newest checkpoint there it goes on
data = ""  # what the server tests on, an .npz file; "": the recipe's own data, without those of clients
clients = ""  # their names, "a,b,c", if `data` is set, and in Flower's simulation
data-folder = ""  # Flower's simulation: where the clients' files are, by their names
memories = ""  # Flower's simulation: where clients keep what they remember; "": in the user's cache
clients-at-least = {terms.clients_at_least}  # a round needs the answers of so many clients
round-seconds = {terms.round_seconds}  # after these it does not wait for the others
join-seconds = {terms.join_seconds}  # so long the server waits for so many
message-bytes = {terms.message_bytes}  # a message may be so large
most-samples = {terms.most_samples}  # a client counts as at most so many a round; 0: as many as it said at first
largest-update = {terms.largest_update}  # it may move the model by so many times the larger of its norm and 1
registered-keys = false  # whether the SuperLink lets registered keys in alone: each keeps its client's name
"""


def write_app(recipe: Mapping[str, Any], folder: Path, name: str, publisher: str = "lightning-fcl") -> list[Path]:
    parts = build(recipe)
    methods = [callback for callback in parts.callbacks if isinstance(callback, Declaration)]
    check_deployable(parts.strategy.federation.participation, methods)
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "app"
    project = _PROJECT.format(
        name=slug,
        publisher=publisher,
        fingerprint=fingerprint(recipe),
        version=__version__,
        terms=Terms(),
    )
    texts = {
        "recipe.yaml": yaml.safe_dump(dict(recipe), sort_keys=False),
        "client_app.py": _CLIENT,
        "server_app.py": _SERVER,
        "pyproject.toml": project,
    }
    return [write_whole(folder / file, text) for file, text in texts.items()]
