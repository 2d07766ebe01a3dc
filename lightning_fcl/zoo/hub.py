"""The Hugging Face hub: a repository holds one published network, each commit a version of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fcl.errors import require
from lightning_fcl.evaluation.files import writing
from lightning_fcl.zoo.entry import CONFIG, CONTINUE, FILES, SUMS, Entry, read_entry, read_files

_REPOSITORY = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<commit>[0-9a-f]{40}))?")


class Head(NamedTuple):
    """What a repository holds now."""

    repository: str
    commit: str
    entry: Entry | None


def from_hub(name: str, to_continue: bool) -> Path:
    """The folder of the files of a repository at a commit, such as ``"hf:organisation/repository@..."``."""
    parts = _REPOSITORY.fullmatch(name)
    if parts is None or parts["commit"] is None:
        raise ValueError(
            f"Expected hf:organisation/repository@ and the 40 digits of a commit but got {name!r}: what a branch holds "
            "changes."
        )
    with _speaking(f"get {name}", "Check the name, or try again.") as hub:
        bring = partial(hub.hf_hub_download, parts["repository"], revision=parts["commit"])
        folder = Path(bring(SUMS)).parent
        for file in read_files(folder):
            if to_continue or file != CONTINUE:
                bring(file)
    return folder


def read_head(name: str) -> Head:
    """What a repository such as ``"hf:organisation/repository"`` holds now; it is made if it is not there."""
    parts = _REPOSITORY.fullmatch(name)
    if parts is None or parts["commit"] is not None:
        raise ValueError(f"Expected hf:organisation/repository to publish to but got {name!r}.")
    repository = parts["repository"]
    with _speaking(f"make or read {name}", _LOG_IN) as hub:
        api = hub.HfApi()
        api.create_repo(repository, exist_ok=True)
        info = api.model_info(repository)
        held = CONFIG in [file.rfilename for file in info.siblings or []]
        path = Path(hub.hf_hub_download(repository, CONFIG, revision=info.sha)) if held else None
    return Head(repository, info.sha, read_entry(path) if path else None)


def upload(folder: Path, head: Head, message: str) -> str:
    """Put a folder's files in place of a repository's, in one commit after the one that was seen."""
    files = [SUMS, *FILES]
    with _speaking(f"bring {folder.name} to {head.repository}", _LOG_IN) as hub:
        commit = hub.HfApi().upload_folder(
            repo_id=head.repository,
            folder_path=folder,
            commit_message=message,
            parent_commit=head.commit,
            allow_patterns=files,
            delete_patterns=files,
        )
    return f"hf:{head.repository}@{commit.oid}"


_LOG_IN = "Log in by `hf auth login` with a token that may write, and try again."


@contextmanager
def _speaking(what: str, remedy: str) -> Iterator[Any]:
    """The hub's library, whose many errors, those of its HTTP library among them, become one."""
    for_what = "speaks to the Hugging Face hub"
    hub, cache = require("huggingface_hub", for_what), require("huggingface_hub.constants", for_what).HF_HUB_CACHE
    with writing(Path(cache), then="try again"):
        try:
            yield hub
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # the disk's
                raise
            raise ConnectionError(f"Expected to {what} but got: {error}. {remedy}") from error
