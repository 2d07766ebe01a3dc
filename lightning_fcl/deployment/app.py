"""A Flower app of a recipe: a folder with four files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_fcl import __version__
from lightning_fcl.deployment.recipe import build, fingerprint
from lightning_fcl.deployment.server import Terms, check_deployable
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.running.rows import slug

_SIDES = {
    "client": "What a node runs: the recipe beside this file, on the data that its node config names.",
    "server": "What the server runs: the recipe beside this file, whose rounds come from nodes.",
}
_APP = '''"""{what}"""

from pathlib import Path

from lightning_fcl.deployment.flower import {side}_app

app = {side}_app(Path(__file__).parent)
'''


def write_app(recipe: Mapping[str, Any], folder: Path, name: str, publisher: str = "lightning-fcl") -> list[Path]:
    parts = build(recipe)
    methods = [callback for callback in parts.callbacks if isinstance(callback, Declaration)]
    check_deployable(parts.strategy.federation.participation, methods)
    folder.mkdir(parents=True, exist_ok=True)
    project = Path(__file__).with_name("app.toml").read_text(encoding="utf-8")
    project = project.format(
        name=slug(name) or "app",
        publisher=publisher,
        fingerprint=fingerprint(recipe),
        version=__version__,
        terms=Terms(),
    )
    texts = {"recipe.yaml": yaml.safe_dump(dict(recipe), sort_keys=False)}
    texts |= {f"{side}_app.py": _APP.format(side=side, what=what) for side, what in _SIDES.items()}
    return [write_whole(folder / file, text) for file, text in {**texts, "pyproject.toml": project}.items()]
