"""Where files come from, how they are found on disk or fetched from afar, and what is told where they are missing."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_fcl.errors import ConnectionFailedError, FileAccessError, InvalidValueError, MissingFileError
from lightning_fcl.io.atomic import disk_error_context
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.validation import require_package


def download(url: str, path: Path, digest: str, next_step: str = "") -> Path:
    """The file of a URL, if it is of the digest; one that is here and whole is not asked for again.

    Another one that is here stays until this one has come, whole.

    Args:
        next_step: What is to be done with a file that was downloaded by hand.
    """
    pooch = require_package("pooch", "downloads files and verifies them")
    requests = require_package("requests", "downloads files")
    with disk_error_context(path, remedy="try again"):
        if path.is_file() and pooch.hashes.hash_matches(str(path), digest):
            return path
        settings = (os.environ.get(name, "") for name in ("LIGHTNING_FCL_OFFLINE", "HF_HUB_OFFLINE"))
        if any(setting.lower() not in ("", "0", "false", "no") for setting in settings):
            raise ConnectionFailedError(
                f"Expected {path} to be there, as nothing is downloaded in offline mode, but it is not.",
                hint=f"Unset LIGHTNING_FCL_OFFLINE and HF_HUB_OFFLINE, or download {url} to this path by hand.",
                value=path,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        pooch.get_logger().setLevel("WARNING")  # the bar shows it
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=30)
        try:
            pooch.retrieve(url, digest, path.name, path.parent, downloader=downloader)
        except requests.RequestException as error:
            raise ConnectionFailedError(
                f"Expected to download {url} but got: {error}.",
                hint=f"Try again, or download it by hand to {path}{next_step}.",
                value=url,
            ) from error
        except ValueError as error:
            raise InvalidValueError(
                f"Expected the file of digest {digest} from {url} but got: {error}. Nothing of it is kept.",
                hint="Try again. If the file has changed, ask its publisher for the new digest.",
                argument="sha256",
                value=digest,
            ) from error
    return path


def data_root(root: str | Path | None = None) -> Path:
    """The folder of the data sets: the argument, else ``LIGHTNING_FCL_DATA``, else a folder in the user's cache."""
    folder = root or os.environ.get("LIGHTNING_FCL_DATA") or Path("~/.cache/lightning-fcl/data")
    return Path(folder).expanduser()


@dataclass(frozen=True)
class Layout:
    """One form in which files lie on disk: a file by its name, or a folder by what is in it.

    Args:
        paths: Paths below the root, the first that fits counts; ``"."`` is the root itself.
        markers: What must all be in the folder, as glob patterns; of patterns with ``|`` between them, one suffices.
            Without any, the place is a file.
        required_file: Regular expression that the whole path of a match, below the folder, must fit as well.
    """

    name: str
    paths: tuple[str, ...]
    markers: tuple[str, ...] = ()
    required_file: str = ".*"

    def find(self, root: Path) -> Path | None:
        """The first place below a root where this layout is; None if it is nowhere."""
        return next((root / place for place in self.paths if self._fits(root / place)), None)

    def _fits(self, location: Path) -> bool:
        def shows(sign: str) -> bool:
            matches = (path for glob in sign.split("|") for path in location.glob(glob))
            return any(re.fullmatch(self.required_file, path.relative_to(location).as_posix()) for path in matches)

        return all(map(shows, self.markers)) if self.markers else location.is_file()


@dataclass(frozen=True)
class Source:
    """Files of a publisher, a data set for example: what they are, where they come from, and how they lie on disk.

    Args:
        title: What messages call them, such as "the ORL faces".
        url: The file to download; without a `digest`, the page that offers it; empty where another package brings it.
        layouts: The layouts that can be read, the preferred first.
        expected_files: Names of what the folder of the data sets may hold, for messages.
        digest: SHA-256 of the file at `url`, or another digest as in ``"md5:..."``; without one nothing is downloaded.
        archive: Where the download is put, below the root.
        folder: What is unpacked of the archive, which is deleted then; empty: the archive is kept as it is.
        manual_steps: What to do where nothing can be downloaded, with ``{url}`` and ``{root}`` for these.
    """

    name: str
    title: str
    content: str
    license: str
    citation: str
    url: str
    size: str
    layouts: tuple[Layout, ...]
    expected_files: str = ""
    digest: str = ""
    archive: str = ""
    folder: str = ""
    manual_steps: str = ""

    @classmethod
    def read(cls, path: Path) -> dict[str, Source]:
        """The sources that a YAML file tells, by name."""
        sources = {}
        for name, source_fields in read_yaml(path).items():
            layouts = tuple(
                Layout(one["name"], tuple(one["paths"]), tuple(one.get("markers", ())), one.get("required_file", ".*"))
                for one in source_fields["layouts"]
            )
            sources[name] = cls(name, **{**source_fields, "layouts": layouts})
        return sources

    def find(self, root: str | Path | None = None) -> tuple[str, Path]:
        """The name of the first layout that is on disk, and its file or folder, which is not read."""
        root = data_root(root)
        for layout in self.layouts:
            if location := layout.find(root):
                return layout.name, location
        hint = self.manual_steps.format(url=self.url, root=root) or f"Run {self.command}"
        if self.expected_files:
            hint += f", or point LIGHTNING_FCL_DATA at the folder that holds {self.expected_files}"
        raise MissingFileError(
            f"Expected {self.title} below `root` but found nothing in {root}.",
            hint=f"{hint}.",
            argument="root",
            value=root,
        )

    def download(self, root: str | Path | None = None) -> Path:
        """Download the files, verify and unpack them, whole or not at all; what is there is not downloaded again."""
        root = data_root(root)
        if not self.digest:
            return self.find(root)[1]
        if self.folder and (unpacked := self.layouts[0].find(root)):
            return unpacked
        next_step = f" and run {self.command} to unpack it" if self.folder else ""
        archive = download(self.url, root / self.archive, self.digest, next_step)
        if not self.folder:
            return archive
        target = archive.parent / self.folder
        try:
            with tempfile.TemporaryDirectory(dir=archive.parent, prefix="unpacking-") as scratch:
                # Verified as it is, it may hold no more than folders need; nothing leads out of where it is put.
                shutil.unpack_archive(archive, scratch, filter=None if archive.suffix == ".zip" else "data")
                (Path(scratch) / self.folder).rename(target)
        except Exception as error:  # whatever a damaged archive makes of its reader
            raise FileAccessError(
                f"Expected to unpack {archive} to {target} but got: {error}.",
                hint=f"Make room, or delete {target}, and run {self.command} again.",
                value=archive,
            ) from error
        archive.unlink()
        return target

    @property
    def command(self) -> str:
        return f"`lightning-fcl data download {self.name}`"

    @property
    def remedy(self) -> str:
        """What to do with a damaged copy, for messages."""
        action = f"run {self.command}" if self.digest else "unpack the publishers' archive again"
        return f"Delete this copy and {action}."
