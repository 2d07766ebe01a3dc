"""The rows of the papers' tables: which recipe each is, and with what arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_fcl.errors import did_you_mean
from lightning_fcl.evaluation.inside import inside


def recipes_folder() -> Path:
    """Where the recipes are: in the installed package, or at the top of a checkout."""
    here = Path(__file__).parent.parent
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def paper_folder(paper: str) -> Path:
    """The folder of a paper's recipes."""
    papers = sorted(path.parent.name for path in recipes_folder().glob("*/rows.yaml"))
    if paper not in papers:
        names = ", ".join(papers)
        raise ValueError(f"Expected `paper` to be one of {names} but got {paper}.{did_you_mean(paper, papers)}")
    return recipes_folder() / paper


def place_of(recipes: Path, scale: str) -> Path:
    """Where the table, figures and kept runs of a scale lie, in a paper's folder."""
    return recipes if scale == "paper" else inside(recipes, scale)


@dataclass(frozen=True)
class Row:
    """A row of a paper's table.

    Args:
        configs: Its recipe: the files of which it is put together, later ones over earlier ones.
        expected: The paper's numbers, where they are not in the files.
        words: What else its command line says.
    """

    configs: tuple[Path, ...]
    expected: Mapping[str, float] | None = None
    words: tuple[str, ...] = ()


def paper_rows(folder: Path, rows: Sequence[str] | None, scale: str = "paper") -> dict[str, Row]:
    """The recipe of every row of a paper's table at a scale, or of the ``rows`` asked for, from ``rows.yaml``.

    There, ``base`` is the file that all rows begin with, and ``rows`` gives each row its own file; or ``configs``,
    several of them, ``set``, further arguments by their dotted names, and ``expected``, the paper's numbers. ``scales``
    are those at which it is run; by default all; ``scaled`` has, for some scales, more to ``set``. For ``grids`` see
    `expanded`.
    """
    content = yaml.safe_load((folder / "rows.yaml").read_text())
    order = expanded(content)
    for row in rows or ():
        if row not in order:
            raise ValueError(f"Expected `rows` among {', '.join(order)} but got {row}.{did_you_mean(row, order)}")
        if scale not in order[row].get("scales", [scale]):
            scales = ", ".join(order[row]["scales"])
            raise ValueError(f"Expected `scale` to be one of {scales} for row {row} but got {scale}.")
    result = {}
    for row in rows or [row for row, entry in order.items() if scale in entry.get("scales", [scale])]:
        entry = order[row]
        names = [content["base"], *entry["configs"]]
        given = {**entry.get("set", {}), **entry.get("scaled", {}).get(scale, {})}
        values = {name: v if isinstance(v, str) else json.dumps(v) for name, v in given.items()}
        words = [word for name, value in values.items() for word in (f"--{name}", value)]
        result[row] = Row(tuple(folder / name for name in names), entry.get("expected"), tuple(words))
    return result


def at_scale(configs: Sequence[Path], scale: str) -> tuple[Path, ...]:
    """A row's files, and that of a scale, which goes over them."""
    if scale == "paper":
        return tuple(configs)
    scaling = configs[0].with_name(f"scale-{scale}.yaml")
    if not scaling.is_file():
        known = sorted(path.stem.removeprefix("scale-") for path in scaling.parent.glob("scale-*.yaml"))
        raise ValueError(f"Expected `scale` to be one of {', '.join([*known, 'paper'])} but got {scale}.")
    return (*configs, scaling)


def scale_of(configs: Iterable[str | Path]) -> str:
    """The scale of a recipe, by its files."""
    names = [Path(config).stem for config in configs]
    return next((name.removeprefix("scale-") for name in names if name.startswith("scale-")), "paper")


def row_words(name: str, row: Row) -> tuple[str, ...]:
    """What a row's command line says beside its files."""
    if row.expected is None:
        return row.words
    return (*row.words, "--recipe.row", name, "--recipe.expected", json.dumps(row.expected))


def row_slug(name: str, row: Row) -> str:
    """A row's name as that of a folder: of a row that is a file, the file's."""
    return row.configs[-1].stem if row.expected is None else slug(name)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def config_words(recipes: Iterable[str | Path]) -> list[str]:
    """The words of a command line that name recipes, later ones over earlier ones."""
    return [word for recipe in recipes for word in ("--config", str(recipe))]


def expanded(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All rows of a ``rows.yaml``, those of its ``grids`` among them.

    A grid runs some ``rows``, by their names, once ``with`` each of some changes: further ``configs`` and ``set``. The
    new rows are called by both names. ``scales`` goes for all of them, ``expected`` gives some the paper's numbers.
    """
    rows: dict[str, dict[str, Any]] = {
        row: dict(entry) if isinstance(entry, dict) else {"configs": [entry]} for row, entry in content["rows"].items()
    }
    result = dict(rows)
    for grid in content.get("grids", []):
        made = [f"{change} {row}" for change in grid["with"] for row in grid["rows"]]
        unknown = [row for row in grid["rows"] if row not in rows] + sorted({*grid.get("expected", {})} - {*made})
        if unknown:
            raise ValueError(f"Expected the rows of a grid among {', '.join([*rows, *made])} but got {unknown[0]}.")
        for change, more in grid["with"].items():
            for row in grid["rows"]:
                name = f"{change} {row}"
                result[name] = {
                    "configs": [*rows[row]["configs"], *more.get("configs", [])],
                    "set": {**rows[row].get("set", {}), **more.get("set", {})},
                    **({"scaled": rows[row]["scaled"]} if "scaled" in rows[row] else {}),
                    "expected": grid.get("expected", {}).get(name, {}),
                    **({"scales": grid["scales"]} if "scales" in grid else {}),
                }
    return result
