"""Train and publish the networks that models.yaml lists: ``python zoo/train.py [NAME ...]``.

``python zoo/train.py --cards`` trains nothing. It writes the cards of all published networks again, with the current
tables of their recipes.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from lightning_fcl.io.atomic import file_lock, write_atomic
from lightning_fcl.io.checksums import check_digest, sha256, write_checksums
from lightning_fcl.runs.paper_rows import paper_folder, paper_rows, recipes_folder
from lightning_fcl.zoo import publish
from lightning_fcl.zoo.loading import read_tensors
from lightning_fcl.zoo.model_entry import CARD, CHECKSUMS_FILE, CONFIG, WEIGHTS, read_entry, read_files
from lightning_fcl.zoo.publishing import metric_spread, model_card
from lightning_fcl.zoo.registry import LOCK, REGISTRY, read_registry, register

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs"


def train(model_settings: dict[str, Any]) -> Path:
    """Run the recipe of a network, and return the folder of the run. A run that exists is not repeated."""
    paper, row, scale = model_settings["recipe"], model_settings.get("row"), model_settings.get("scale", "paper")
    if row is None:
        run = RUNS / "zoo" / paper
        recipe = str(recipes_folder() / f"{paper}.yaml")
        words = ["fit", "--config", recipe, "--out", str(run)] if not (run / "results.json").is_file() else []
    else:
        paper_row = paper_rows(paper_folder(paper), [row], scale)[row]
        run = RUNS / f"{paper}-{scale}" / paper_row.slug / "seed-0"
        words = ["reproduce", paper, "--rows", row, "--scale", scale]
    if words:
        subprocess.run([sys.executable, "-m", "lightning_fcl.cli.main", *words], check=True, cwd=HERE.parent)
    return run


def renew_card(folder: Path) -> bool:
    """Write the card of a published network again, with the current table of its recipe.

    Weights and version do not change. After an interruption, a second call completes the change.

    Returns:
        Whether the text of the card has changed.
    """
    entry, digests = read_entry(folder / CONFIG), read_files(folder)
    check_digest(folder / WEIGHTS, digests[WEIGHTS])
    old = (folder / CARD).read_bytes() if (folder / CARD).is_file() else b""
    text = model_card(entry, metric_spread(entry), read_tensors(folder / WEIGHTS)).encode()
    with file_lock(folder.parent / LOCK):
        write_atomic(folder / CARD, text)
        write_checksums(folder / CHECKSUMS_FILE, {**digests, CARD: sha256(folder / CARD)})
        register(folder)
    return text != old


def publish_all(names: list[str]) -> None:
    """Train and publish the networks with these names, or all networks if ``names`` is empty."""
    content = yaml.safe_load((HERE / "models.yaml").read_text())
    for name in names or content["models"]:
        model_settings = content["models"][name]
        license_terms = {"weights": content["licenses"]["weights"], "data": content["licenses"][name.split(".")[1]]}
        options = {key: model_settings[key] for key in ("numbered_classes", "features") if key in model_settings}
        print(
            publish(
                train(model_settings),
                name,
                HERE,
                model_settings["description"],
                license_terms,
                model_settings.get("limitations", []),
                **options,
            )
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--cards"]:
        for one in read_registry(HERE / REGISTRY):
            if renew_card(HERE / one.folder):
                print(HERE / one.folder)
    else:
        publish_all(sys.argv[1:])
