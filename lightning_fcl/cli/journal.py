"""The journal of a search's trials, which is Optuna's: opened where it is whole, and of this very search."""

from __future__ import annotations

import shutil
from pathlib import Path

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
    if journal.exists():  # a line that a kill or a full disk has cut off at its end is of nothing that was done
        content = journal.read_bytes()
        if not content.endswith(b"\n"):
            write_whole(journal, content[: content.rfind(b"\n") + 1])
    try:
        storage = JournalStorage(JournalFileBackend(str(journal)))
        study = optuna.create_study(storage=storage, study_name="tune", direction=search.direction, load_if_exists=True)
    except Exception as error:  # whatever a damaged line makes of what replays it
        raise ValueError(
            f"Expected {journal} to be as it was written but it is damaged: {type(error).__name__} {error}. Begin anew "
            "with --restart, or choose another --out."
        ) from error
    mark = search.fingerprint(seed)
    if study.user_attrs.get("fingerprint", mark) != mark:
        if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
            raise ValueError(
                f"Expected the search of which {out} has trials but the search file, a recipe of it, or the seed is "
                "another. Take back the change, choose another --out, or begin anew with --restart, which deletes them."
            )
        return open_study(search, seed, out, restart=True)  # nothing is lost
    study.set_user_attr("fingerprint", mark)
    return study
