"""The journal of a search's trials, which is Optuna's: opened where it is whole, and of this very search."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from lightning_fcl.cli.search import Search
from lightning_fcl.evaluation.files import write_whole


def open_study(search: Search, seed: int, out: Path, restart: bool) -> optuna.Study:
    if restart:
        for folder in out.glob("trial-[0-9]*"):
            shutil.rmtree(folder)
        (out / "optuna.journal").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    journal = out / "optuna.journal"
    _mend(journal)
    try:
        storage = JournalStorage(JournalFileBackend(str(journal)))
    except Exception as error:  # whatever a damaged line makes of what replays it
        raise _damaged(journal, f"{type(error).__name__} {error}") from error
    options: Any = {"storage": storage, "study_name": "tune", "direction": search.direction, "load_if_exists": True}
    mark = search.fingerprint(seed)
    study = optuna.create_study(**options)
    if study.user_attrs.get("fingerprint", mark) != mark:
        if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
            raise ValueError(
                f"Expected the search of which {out} has trials but the search file, a recipe of it, or the seed is "
                "another. Take back the change, choose another --out, or begin anew with --restart, which deletes them."
            )
        optuna.delete_study(study_name="tune", storage=storage)  # nothing is lost
        study = optuna.create_study(**options)
    study.set_user_attr("fingerprint", mark)
    return study


def _mend(journal: Path) -> None:
    """Take away the line that a kill or a full disk has cut off at a journal's end; it is of nothing that was done."""
    if not journal.exists():
        return
    content = journal.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        write_whole(journal, whole)
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            json.loads(line)
        except ValueError as error:
            raise _damaged(journal, f"in line {number}, {error}") from error


def _damaged(journal: Path, what: str) -> ValueError:
    return ValueError(
        f"Expected {journal} to be as it was written but it is damaged: {what}. Begin anew with --restart, or choose "
        "another --out."
    )
