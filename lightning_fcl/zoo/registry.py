"""Locations of published networks: a folder, the package, the cache, a URL, or the Hugging Face hub.

A repository of the hub contains one published network. Each commit is a version of the network.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fcl.errors import (
    ConnectionFailedError,
    FileConflictError,
    InvalidValueError,
    MissingFileError,
    UnknownNameError,
)
from lightning_fcl.io.atomic import atomic_path, disk_error_context, file_lock
from lightning_fcl.io.checksums import check_digest, read_checksums, sha256, write_checksums
from lightning_fcl.io.download import download
from lightning_fcl.io.paths import cache_folder, safe_join
from lightning_fcl.io.reading import REDOWNLOAD_HINT
from lightning_fcl.validation import did_you_mean, require_package
from lightning_fcl.zoo.model_entry import (
    CHECKSUMS_FILE,
    CONFIG,
    CONTINUE,
    FILES,
    ModelEntry,
    read_entry,
    read_files,
    read_folder,
)

_REPOSITORY = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<commit>[0-9a-f]{40}))?")


class RepoHead(NamedTuple):
    """Newest commit of a repository, and the entry in this commit. The entry is None if the repository has no entry."""

    repository: str
    commit: str
    entry: ModelEntry | None


def download_from_hub(name: str, to_continue: bool) -> Path:
    """Download the files of a repository at a commit, such as ``"hf:organization/repository@..."``.

    Returns:
        The folder of the files.
    """
    parts = _REPOSITORY.fullmatch(name)
    if parts is None or parts["commit"] is None:
        raise InvalidValueError(
            f"Expected hf:organization/repository@ and the 40 digits of a commit, but got {name!r}. A branch is not "
            "accepted, because its content can change.",
            argument="name",
            value=name,
        )
    with _speaking(f"get {name}", "Check the name, or try again.") as hub:
        bring = partial(hub.hf_hub_download, parts["repository"], revision=parts["commit"])
        folder = Path(bring(CHECKSUMS_FILE)).parent
        for file in read_files(folder):
            if to_continue or file != CONTINUE:
                bring(file)
    return folder


def get_repo_head(name: str) -> RepoHead:
    """Return the newest commit of a repository ``"hf:organization/repository"``, and the entry in this commit.

    A repository that does not exist is created.
    """
    parts = _REPOSITORY.fullmatch(name)
    if parts is None or parts["commit"] is not None:
        raise InvalidValueError(
            f"Expected hf:organization/repository to publish to, but got {name!r}.", argument="name", value=name
        )
    repository = parts["repository"]
    with _speaking(f"create or read {name}", _LOG_IN) as hub:
        api = hub.HfApi()
        api.create_repo(repository, exist_ok=True)
        info = api.model_info(repository)
        has_entry = CONFIG in [file.rfilename for file in info.siblings or []]
        path = Path(hub.hf_hub_download(repository, CONFIG, revision=info.sha)) if has_entry else None
    return RepoHead(repository, info.sha, read_entry(path) if path else None)


def upload(folder: Path, head: RepoHead, message: str) -> str:
    """Replace the entry's files in a repository by the files of a folder, in one commit after ``head``.

    Other files of the repository are kept.

    Returns:
        Name of the network with the new commit, as in ``"hf:organization/repository@..."``.
    """
    files = [CHECKSUMS_FILE, *FILES]
    with _speaking(f"upload {folder.name} to {head.repository}", _LOG_IN) as hub:
        commit = hub.HfApi().upload_folder(
            repo_id=head.repository,
            folder_path=folder,
            commit_message=message,
            parent_commit=head.commit,
            allow_patterns=files,
            delete_patterns=files,
        )
    return f"hf:{head.repository}@{commit.oid}"


_LOG_IN = "Log in with `hf auth login` and a token with write access, and try again."


@contextmanager
def _speaking(action: str, remedy: str) -> Iterator[Any]:
    """Yield the package ``huggingface_hub``. Errors in the block, except disk errors, become ConnectionFailedError."""
    for_what = "connects to the Hugging Face hub"
    hub, cache = (
        require_package("huggingface_hub", for_what),
        require_package("huggingface_hub.constants", for_what).HF_HUB_CACHE,
    )
    with disk_error_context(Path(cache), remedy="try again"):
        try:
            yield hub
        except Exception as error:
            # Errors of the disk have an error number.
            if isinstance(error, OSError) and error.errno:
                raise
            raise ConnectionFailedError(f"Expected to {action}, but got: {error}.", hint=remedy) from error


REGISTRY, LOCK = "registry.txt", ".registry.lock"

_URL = re.compile(r"(?P<url>https?://[^#]+?)/?(#sha256=(?P<digest>[0-9a-f]{64}))?", re.IGNORECASE)
_FOLDER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}(@[1-9][0-9]{0,8})?")


@dataclass(frozen=True)
class RegistryEntry:
    """A network listed in a registry.

    Args:
        folder: Name of the network's folder.
        digest: SHA-256 of the file that lists the network's files.
        registry_folder: Folder of the registry, which may contain the network's folder.
        url: URL to download missing files from. Empty: missing files are not downloaded.
    """

    folder: str
    digest: str
    registry_folder: Path
    url: str = ""

    @property
    def name(self) -> str:
        return self.folder.partition("@")[0]

    @property
    def version(self) -> int:
        return int(self.folder.partition("@")[2] or 1)

    @property
    def entry(self) -> ModelEntry:
        return self._entry(self._bring((CONFIG,)))

    def download(self, to_continue: bool = False) -> Path:
        """Download missing files, verify the files, and return the folder with the files.

        The folder is in the folder of the registry, or in the cache.
        """
        folder = self._bring(FILES if to_continue else [name for name in FILES if name != CONTINUE])
        self._entry(folder)
        return folder

    def _bring(self, file_names: Collection[str]) -> Path:
        entry_folder, cached_folder = (
            safe_join(self.registry_folder, self.folder),
            safe_join(cache_folder() / "zoo", self.digest),
        )
        for candidate in [entry_folder] if self.url else [entry_folder, cached_folder]:
            if (candidate / CHECKSUMS_FILE).is_file():
                check_digest(candidate / CHECKSUMS_FILE, self.digest)
                files = {name: digest for name, digest in read_files(candidate).items() if name in file_names}
                if all((candidate / name).is_file() for name in files):
                    for name, digest in files.items():
                        check_digest(candidate / name, digest)
                    return candidate
        if not self.url:
            if self.registry_folder != package_folder():
                raise MissingFileError(
                    f"Expected the files of {self.folder} in {entry_folder}, but some of them do not exist.",
                    hint="Copy the missing files to this folder.",
                    value=self.folder,
                )
            raise MissingFileError(
                f"Expected the files of {self.folder} in {entry_folder}, but they are not installed. The package "
                "contains no large files, no files to continue from, and no files whose license forbids distribution.",
                hint="Set LIGHTNING_FCL_ZOO to the folder `zoo` of a checkout, or to a URL that serves this folder.",
                value=self.folder,
            )
        download(f"{self.url}/{self.folder}/{CHECKSUMS_FILE}", cached_folder / CHECKSUMS_FILE, self.digest)
        for name, digest in read_files(cached_folder).items():
            if name in file_names:
                download(f"{self.url}/{self.folder}/{name}", safe_join(cached_folder, name), digest)
        return cached_folder

    def _entry(self, folder: Path) -> ModelEntry:
        entry = read_entry(folder / CONFIG)
        if entry.folder != self.folder:
            raise InvalidValueError(
                f"Expected the folder of {entry.full_name} to be named {entry.folder}, but got {self.folder}.",
                hint=f"Rename the folder to {entry.folder}, also in {REGISTRY}.",
                argument="folder",
                value=self.folder,
            )
        return entry


def list_models(pattern: str = "*", pretrained: bool = True) -> list[str]:
    """Return the sorted names of published networks, or of the network classes and functions of the package.

    Args:
        pattern: Shell-style pattern, such as ``"*har*"``.
        pretrained: Whether to list published networks. False lists the public names of `lightning_fcl.models`: network
            classes, and functions that return networks.

    Example:
        >>> list_models("mlp.*")
        ['mlp.digits.flwf2t_replay']
    """
    if not pretrained:
        return sorted(
            name for name in import_module("lightning_fcl.models").__all__ if fnmatch(name.lower(), pattern.lower())
        )
    return [*list_published(pattern)]


def list_published(pattern: str = "*") -> dict[str, RegistryEntry]:
    """Return the newest version of each published network, by name in alphabetical order.

    If several registries contain a name, the first registry is used.
    """
    newest: dict[str, RegistryEntry] = {}
    for registry in registries():
        newest = {entry.name: entry for entry in sorted(registry, key=lambda entry: entry.version)} | newest
    return {name: newest[name] for name in sorted(newest) if fnmatch(name, pattern)}


def resolve_folder(name: str | Path, to_continue: bool = False) -> Path:
    """Return the local folder of an entry. A path is not checked. For a name in a registry, the files are verified."""
    text = str(name)
    if isinstance(name, Path) or (os.sep in text and not text.startswith("hf:")):
        return Path(name).expanduser()
    return download_from_hub(text, to_continue) if text.startswith("hf:") else get_entry(text).download(to_continue)


def get_entry(name: str) -> RegistryEntry:
    """Return the published network with a name: the version in the name, otherwise the newest version."""
    base, _, version = name.partition("@")
    for registry in registries():
        if matches := [entry for entry in registry if entry.name == base and version in ("", str(entry.version))]:
            return max(matches, key=lambda entry: entry.version)
    hint = did_you_mean(base, list_models())
    raise UnknownNameError(
        f"Expected the name of a published model, but got {name!r}.",
        hint=f"{hint} List all names with `lightning-fcl zoo ls`.",
        argument="name",
        value=name,
    )


def registries() -> Iterator[list[RegistryEntry]]:
    """Yield the registry in ``LIGHTNING_FCL_ZOO`` if the variable is set, then the package's registry.

    The variable contains a folder, or a URL that may end in ``#sha256=`` and the SHA-256 of the registry. The registry
    of a URL without a SHA-256 is not read. Files that are missing in the package are downloaded from the URL.
    """
    location = os.environ.get("LIGHTNING_FCL_ZOO", "")
    remote = _URL.fullmatch(location)
    url = remote["url"] if remote else ""
    if remote and remote["digest"]:
        digest = remote["digest"].lower()
        file = download(f"{url}/{REGISTRY}", safe_join(cache_folder() / "zoo", digest, REGISTRY), digest)
        yield read_registry(file, url)
    elif location and not remote:
        file = Path(location).expanduser() / REGISTRY
        if not file.is_file():
            raise MissingFileError(
                f"Expected LIGHTNING_FCL_ZOO to be a URL, or a folder with {REGISTRY}, but got {location}."
            )
        yield read_registry(file)
    yield read_registry(package_folder() / REGISTRY, url)


@cache
def package_folder() -> Path:
    """Return the folder of the package's own zoo: in the wheel, or in the checkout."""
    shipped = Path(__file__).parent / "models"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "zoo"


def read_registry(file: Path, url: str = "") -> list[RegistryEntry]:
    """Return the networks listed in a registry. Empty if the file does not exist."""
    lines = read_checksums(file) if file.is_file() else {}
    digests = {name.removesuffix(f"/{CHECKSUMS_FILE}"): digest for name, digest in lines.items()}
    for folder in digests:
        if not _FOLDER.fullmatch(folder):
            raise InvalidValueError(
                f"Expected NAME/{CHECKSUMS_FILE} in each line of {file}, but got {folder[:100]!r}.",
                hint=REDOWNLOAD_HINT,
                value=file,
            )
        safe_join(file.parent, folder)
    return [RegistryEntry(folder, digest, file.parent, url) for folder, digest in digests.items()]


def register(folder: Path) -> None:
    """Add an entry to the registry file in the parent folder of the entry's folder."""
    file = folder.parent / REGISTRY
    digests = read_checksums(file) if file.is_file() else {}
    write_checksums(file, {**digests, f"{folder.name}/{CHECKSUMS_FILE}": sha256(folder / CHECKSUMS_FILE)})


def copy_to_registry(folder: Path, registry_folder: Path) -> Path:
    """Copy the folder of an entry into the folder of a registry, and register the entry. Return the new folder."""
    entry, files = read_folder(folder), read_files(folder)
    target = safe_join(registry_folder, entry.folder)
    with disk_error_context(target):
        target.mkdir(parents=True, exist_ok=True)
        with file_lock(registry_folder / LOCK):
            if (
                any((target / name).exists() for name in (CHECKSUMS_FILE, *FILES))
                and read_entry(target / CONFIG).name != entry.name
            ):
                raise FileConflictError(
                    f"Expected {target} to contain {entry.name}, but it contains another network.",
                    hint="Move or delete that folder.",
                    value=target,
                )
            for name in (*files, CHECKSUMS_FILE):
                if (folder / name).exists():
                    with atomic_path(target / name) as copy:
                        shutil.copy2(folder / name, copy)
            register(target)
    return target
