"""Atomic writes, locks, and temporary directories that are removed with their owner.

A file is written under a temporary name and then renamed, so that an interruption leaves no half-written file.
Temporary files and directories are locked while their owner runs. The next process takes over or removes what a killed
process has left.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_fcl.errors import DiskFullError, FileAccessError, InvalidValueError
from lightning_fcl.io.paths import cache_folder

if sys.platform != "win32":
    import fcntl

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_CLOSED |= {errno.ENAMETOOLONG}
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of file systems that synchronize no folders
_LOCK = ".lock"
_PREFIX = "lightning-fcl-"
_temporary: set[Path] = set()  # what a sudden end must not leave behind
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_temporary.clear)  # it is the parent's


@contextmanager
def atomic_path(path: Path, size: int | None = None, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, and rename it to ``path`` if the block raises no error.

    Args:
        path: The path of the file.
        size: The number of bytes of the file, for the message about a full disk.
        sync: Whether the file survives a power failure from here on. Otherwise, call `sync_files` later.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_error_context(path, size):
        if (descriptor := _lock(temporary)) is None:  # others may write the same
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.unlink(missing_ok=True)  # a link, perhaps
        _temporary.add(temporary)
        try:
            yield temporary
            if sync:
                _sync(temporary)
            os.replace(temporary, path)
            if sync:
                _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            _temporary.discard(temporary)
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def disk_error_context(
    path: Path, size: int | None = None, remedy: str = "go on from the newest checkpoint"
) -> Iterator[None]:
    """Say in one message where a disk does not let something be written, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            space = "more room" if size is None else f"{size:,} bytes"
            free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
            raise DiskFullError(
                f"Expected {space} for {path} but the disk is full, or a quota reached: {free:,} bytes are free. "
                "Nothing that was there is lost.",
                hint=f"Make room, then {remedy}.",
                value=path,
            ) from error
        if error.errno in _CLOSED:
            cache_hint = " by LIGHTNING_FCL_CACHE" if path.is_relative_to(cache_folder()) else ""
            raise FileAccessError(
                f"Expected to write {path} but got: {error}.",
                hint=f"Create its folder, with permission to write, or use another folder{cache_hint}.",
                value=path,
            ) from error
        raise


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Let one process at a time do something, while the others wait: a file is made for as long, and locked."""
    with disk_error_context(path):
        descriptor = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


def write_atomic(path: Path, content: str | bytes, sync: bool = True) -> Path:
    """Write a file atomically, text in UTF-8, and return its path. See `atomic_path` for ``sync``."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path, len(data), sync) as temporary:
        temporary.write_bytes(data)
    return path


def append(path: Path, size: int, data: bytes) -> None:
    """Write data behind the first ``size`` bytes of a file, in place of all bytes that follow them."""
    with disk_error_context(path, len(data)):
        is_new = not path.exists()
        path.touch()
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync(path.parent)


def sync_files(paths: Iterable[Path]) -> None:
    """Let files that were written without ``sync`` survive a power failure. A file that was removed is skipped.

    Each folder is synchronized once.
    """
    folders = set()
    for path in paths:
        with disk_error_context(path), suppress(FileNotFoundError):
            _sync(path)
        folders.add(path.parent)
    for folder in folders:
        _sync(folder)


def _sync(path: Path) -> None:
    """Write a file, or the entries of a folder, from the memory of the system to the disk."""
    is_folder = path.is_dir()
    if is_folder and sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in _NO_SYNC):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Let no other process train in a run's folder until the end of the block, or that of this process."""
    path = folder.resolve() / _LOCK
    if sys.platform == "win32" or path in _temporary:  # it is this process's already
        yield
        return
    with disk_error_context(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path, wait=False)
    if descriptor is not None:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
        _temporary.add(path)
    try:
        yield
    finally:
        if descriptor is not None:
            _remove(path)
            os.close(descriptor)


class TemporaryFolder:
    """A folder below the system's temporary one that goes with its owner, at the latest when its process ends.

    Those of owners that were killed go when the next is made.
    """

    def __init__(self, name: str) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
            with suppress(FileNotFoundError):  # another has swept it before it was locked
                descriptor = _lock(self.path / _LOCK)
                break
        _temporary.add(self.path)
        self._finalizer = weakref.finalize(self, _leave, self.path, descriptor)

    def cleanup(self) -> None:
        self._finalizer()


@contextmanager
def private_temporary_folder() -> Iterator[None]:
    """Let all that this process and its children write for a while, other libraries too, lie in one folder of its own.

    So it goes with the process, or is swept if that was killed.
    """
    folder, previous_tmpdir = TemporaryFolder("run"), os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        os.environ |= {} if previous_tmpdir is None else {"TMPDIR": previous_tmpdir}
        tempfile.tempdir = None
        folder.cleanup()


def remove_temporary() -> None:
    """Remove this process's temporary files and folders: before an end at which nothing else is done."""
    for path in [*_temporary]:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    _temporary.discard(path)


def _leave(path: Path, descriptor: int | None) -> None:
    if path in _temporary:  # a forked process has its parent's finalizers
        _remove(path)
    if descriptor is not None:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove the folders of killed owners: those of this user that are locked by nobody."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its owner lives, or it has gone meanwhile
            if folder.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(descriptor)


def _lock(path: Path, wait: bool = True) -> int | None:
    """Make a file and lock it until its descriptor is closed, at the latest when this process ends.

    None: the system knows no locks, or not for this place.
    """
    if sys.platform == "win32":
        return None
    while True:
        if path.is_symlink():  # what is written goes into this file, and into no other
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace") or "another one"
            os.close(descriptor)
            raise InvalidValueError(
                f"Expected {path.parent} to be trained in by one process but process {owner} does so now.",
                hint="Wait until that process ends, or use another folder with `--out`.",
            ) from None
        except OSError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        os.close(descriptor)  # its owner has renamed or removed it before it could be locked
