"""Verified downloads of files, and the sources that describe where datasets come from and how they are stored."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_fcl.errors import ConnectionFailedError, FileAccessError, InvalidValueError, MissingFileError
from lightning_fcl.io.atomic import disk_error_context
from lightning_fcl.io.safe_yaml import read_yaml
from lightning_fcl.validation import require_package


def download(url: str, path: Path, digest: str, next_step: str = "") -> Path:
    """Download a file, verify the checksum, and return the path. A file that already has the checksum is kept.

    An existing file with a different checksum is kept until the download is complete.

    Args:
        url: URL of the file.
        path: Path to write the file to.
        digest: SHA-256 checksum of the file. For another algorithm, name and checksum, such as ``"md5:..."``.
        next_step: Continuation of the hint to download the file by hand, such as " and run a command to unpack it".

    Raises:
        ConnectionFailedError: If the download fails, or if a download is needed in offline mode.
        InvalidValueError: If the checksum of the downloaded file differs from ``digest``.
    """
    pooch = require_package("pooch", "downloads files and verifies them")
    requests = require_package("requests", "downloads files")
    with disk_error_context(path, remedy="try again"):
        if path.is_file() and pooch.hashes.hash_matches(str(path), digest):
            return path
        settings = (os.environ.get(name, "") for name in ("LIGHTNING_FCL_OFFLINE", "HF_HUB_OFFLINE"))
        if any(setting.lower() not in ("", "0", "false", "no") for setting in settings):
            raise ConnectionFailedError(
                f"Expected {path} to exist because offline mode forbids downloads, but the file is missing or has "
                "another checksum.",
                hint=f"Unset LIGHTNING_FCL_OFFLINE and HF_HUB_OFFLINE, or download {url} to this path by hand.",
                value=path,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        pooch.get_logger().setLevel("WARNING")  # do not log each download
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=30)
        try:
            pooch.retrieve(url, digest, path.name, path.parent, downloader=downloader)
        except requests.RequestException as error:
            raise ConnectionFailedError(
                f"Expected to download {url}, but got: {error}.",
                hint=f"Try again, or download the file by hand to {path}{next_step}.",
                value=url,
            ) from error
        except ValueError as error:
            raise InvalidValueError(
                f"Expected a file with the digest {digest} from {url}, but got: {error}. The download was deleted.",
                hint="Try again. If the file has changed, ask its publisher for the new digest.",
                argument="sha256",
                value=digest,
            ) from error
    return path


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the datasets: the argument, ``LIGHTNING_FCL_DATA``, or a folder in the user's cache."""
    folder = root or os.environ.get("LIGHTNING_FCL_DATA") or Path("~/.cache/lightning-fcl/data")
    return Path(folder).expanduser()


@dataclass(frozen=True)
class Layout:
    """One way in which files can be stored on disk: a file with a given name, or a folder with given content.

    Args:
        name: Name of the layout.
        paths: Paths relative to the root. The first path that matches is used. ``"."`` is the root itself.
        markers: Glob patterns for files in the folder. Each pattern must match a file. ``|`` separates alternatives in
            a pattern. Without markers, the layout is a single file.
        required_file: Regular expression that must match a file that a marker finds. The expression must match the
            whole path of the file, relative to the folder.
    """

    name: str
    paths: tuple[str, ...]
    markers: tuple[str, ...] = ()
    required_file: str = ".*"

    def find(self, root: Path) -> Path | None:
        """Return the first path below a root that has this layout, or None if there is no such path."""
        return next((root / place for place in self.paths if self._fits(root / place)), None)

    def _fits(self, location: Path) -> bool:
        def shows(sign: str) -> bool:
            matches = (path for glob in sign.split("|") for path in location.glob(glob))
            return any(re.fullmatch(self.required_file, path.relative_to(location).as_posix()) for path in matches)

        return all(map(shows, self.markers)) if self.markers else location.is_file()


@dataclass(frozen=True)
class Source:
    """A source of files, such as a dataset: its license, its download, and the layouts in which it can be stored.

    Args:
        name: Name of the source in CLI commands.
        title: Name of the files in messages, such as "the ORL faces".
        content: Description of the files.
        license: License of the files.
        citation: Citation of the files.
        citation_keys: Keys of the papers in ``evaluation/citations.bib``.
        url: URL of the file to download. Without ``digest``, the URL of the page that offers the files. Empty if
            another package contains the files.
        size: Size of the download.
        layouts: Supported layouts, the preferred layout first.
        expected_files: Names of files that the folder of the datasets can contain, for messages.
        digest: SHA-256 checksum of the file at ``url``, or another checksum such as ``"md5:..."``. Empty if the files
            cannot be downloaded.
        archive: Path of the download relative to the root.
        folder: Folder in the archive to unpack. The archive is deleted after unpacking. If empty, the download is not
            unpacked.
        manual_steps: Hint for files that cannot be downloaded. Can contain the placeholders ``{url}`` and ``{root}``.
    """

    name: str
    title: str
    content: str
    license: str
    citation: str
    url: str
    size: str
    layouts: tuple[Layout, ...]
    citation_keys: tuple[str, ...] = ()
    expected_files: str = ""
    digest: str = ""
    archive: str = ""
    folder: str = ""
    manual_steps: str = ""

    @classmethod
    def read(cls, path: Path) -> dict[str, Source]:
        """Return the sources that a YAML file defines, by name."""
        sources = {}
        for name, source_fields in read_yaml(path).items():
            layouts = tuple(
                Layout(one["name"], tuple(one["paths"]), tuple(one.get("markers", ())), one.get("required_file", ".*"))
                for one in source_fields["layouts"]
            )
            citation_keys = tuple(source_fields.get("citation_keys", ()))
            sources[name] = cls(name, **{**source_fields, "layouts": layouts, "citation_keys": citation_keys})
        return sources

    def find(self, root: str | Path | None = None) -> tuple[str, Path]:
        """Return the name of the first layout that exists on disk, and the path of its file or folder.

        The files are not read.

        Raises:
            MissingFileError: If no layout exists on disk.
        """
        root = data_root(root)
        for layout in self.layouts:
            if location := layout.find(root):
                return layout.name, location
        hint = self.manual_steps.format(url=self.url, root=root) or f"Run {self.command}"
        if self.expected_files:
            hint += f", or set LIGHTNING_FCL_DATA to the folder that contains {self.expected_files}"
        raise MissingFileError(
            f"Expected {self.title} below `root`, but found no such files in {root}.",
            hint=f"{hint}.",
            argument="root",
            value=root,
        )

    def download(self, root: str | Path | None = None) -> Path:
        """Download, verify and unpack the files, and return their path.

        Existing files are not downloaded again. An interrupted download leaves no incomplete files. If the source has
        no download, return the path of the existing files.

        Raises:
            MissingFileError: If the source has no download, and its files do not exist on disk.
            ConnectionFailedError: If the download fails.
            InvalidValueError: If the checksum of the downloaded file is wrong.
            FileAccessError: If the archive cannot be unpacked.
        """
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
                # The size of the unpacked files is not limited, because the archive is verified.
                unpack(archive, Path(scratch))
                (Path(scratch) / self.folder).rename(target)
        except Exception as error:  # a damaged archive can cause any error in its reader
            raise FileAccessError(
                f"Expected to unpack {archive} to {target}, but got: {error}.",
                hint=f"If the disk is full, free disk space. Otherwise, delete {target}. Then repeat {self.command}.",
                value=archive,
            ) from error
        archive.unlink()
        return target

    @property
    def command(self) -> str:
        """Command that downloads the files, for messages."""
        return f"`lightning-fcl data download {self.name}`"

    @property
    def remedy(self) -> str:
        """Hint for a damaged copy of the files."""
        action = f"run {self.command}" if self.digest else "unpack the publishers' archive again"
        return f"Delete this copy and {action}."


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar file to a folder. No file is written outside of the folder.

    Raises:
        InvalidValueError: If a tar file contains a member that is neither a file nor a folder, or a path that leads out
            of the folder.
    """
    if archive.suffix == ".zip":
        shutil.unpack_archive(archive, folder)  # skips absolute paths and paths with ..
        return
    root = os.path.realpath(folder)
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(os.path.realpath(folder / member.name))
            if not (member.isfile() or member.isdir()) or not path.is_relative_to(root):
                raise InvalidValueError(
                    f"Expected {archive} to contain only files and folders within it, but got {member.name[:300]!r}.",
                    value=member.name,
                )
        # Python 3.11.0 to 3.11.3 has no filters, and later versions warn if no filter is set.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
