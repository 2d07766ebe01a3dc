"""Atomic writes, locks and temporary folders.

Except in `append`, a file is written under a temporary name and then renamed, so that an interruption leaves no
incomplete file under the final name. A process locks its temporary files and folders while it uses them. After a
process was killed, a later process reuses or removes the temporary files and folders.
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
# Errors for which the fix is another folder, or other permissions.
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_CLOSED |= {errno.ENAMETOOLONG}
# Errors of file systems that cannot synchronize folders.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
_LOCK = ".lock"
_PREFIX = "lightning-fcl-"
# Files and folders of this process that `remove_temporary` deletes.
_temporary: set[Path] = set()
if sys.platform != "win32":
    # After a fork, these files and folders belong only to the parent process.
    os.register_at_fork(after_in_child=_temporary.clear)


@contextmanager
def atomic_path(path: Path, size: int | None = None, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``. Rename the file to ``path`` if the block raises no error.

    If the block raises an error, the temporary file is removed.

    Args:
        path: Path of the file.
        size: Size of the file in bytes, for the message about a full disk.
        sync: Whether to flush the file to the disk at the end of the block. If False, call `sync_files` later.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_error_context(path, size):
        # Without locks, other processes could write the same temporary file, so the name contains the process ID.
        if (descriptor := _lock(temporary)) is None:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.unlink(missing_ok=True)  # the path could be a symbolic link
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


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which may not exist yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(one for one in [folder, *folder.parents] if one.exists())).free


@contextmanager
def disk_error_context(
    path: Path, size: int | None = None, remedy: str = "resume from the newest checkpoint"
) -> Iterator[None]:
    """Convert a disk error in the block to an error that names the path, the reason and a fix.

    Other errors are raised unchanged.

    Args:
        path: Path to be written.
        size: Required size in bytes, for the message about a full disk.
        remedy: Action that the hint names after "Free disk space, then".

    Raises:
        DiskFullError: If the disk is full, the disk quota is reached, or the file is too large for the file system.
        FileAccessError: If the path cannot be written, for example without permission.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            space = "more" if size is None else f"{size:,} bytes of"
            free = free_bytes(path.parent)
            raise DiskFullError(
                f"Expected {space} free disk space for {path}, but the disk is full, the disk quota is reached, or the "
                f"file is too large for the file system: {free:,} bytes are free. No existing data is lost.",
                hint=f"Free disk space, then {remedy}.",
                value=path,
            ) from error
        if error.errno in _CLOSED:
            cache_hint = " (set LIGHTNING_FCL_CACHE)" if path.is_relative_to(cache_folder()) else ""
            raise FileAccessError(
                f"Expected to write {path}, but got: {error}.",
                hint=f"Create the parent folder with write permission, or use another folder{cache_hint}.",
                value=path,
            ) from error
        raise


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a path during the block. Other processes wait for the lock.

    The lock file is created before the block and removed after it. The block runs
    without a lock on Windows, and on file systems that do not support locks.
    """
    with disk_error_context(path):
        descriptor = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


def write_atomic(path: Path, content: str | bytes, sync: bool = True) -> Path:
    """Write a file atomically, and return the path. Text is encoded in UTF-8. See `atomic_path` for ``sync``."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path, len(data), sync) as temporary:
        temporary.write_bytes(data)
    return path


def append(path: Path, size: int, data: bytes) -> None:
    """Keep the first ``size`` bytes of a file, and replace all later bytes by ``data``. Create the file if needed."""
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
    """Flush files that were written with ``sync=False`` to the disk. A later power failure does not damage them.

    Removed files are skipped. Each folder is synchronized once.
    """
    folders = set()
    for path in paths:
        with disk_error_context(path), suppress(FileNotFoundError):
            _sync(path)
        folders.add(path.parent)
    for folder in folders:
        _sync(folder)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, from the cache of the operating system to the disk."""
    is_folder = path.is_dir()
    if is_folder and sys.platform == "win32":  # Windows cannot open folders
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
    """Prevent other processes from training in the folder of a run until the block or this process ends.

    The folder is not locked on Windows, or on a file system that does not support locks.

    Raises:
        InvalidValueError: If another process is training in the folder.
    """
    path = folder.resolve() / _LOCK
    if sys.platform == "win32" or path in _temporary:  # Windows has no lock, or this process already holds the lock
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
    """A temporary folder that is removed when the object is deleted or when the process ends.

    The folder is in the system's temporary directory. If a process is killed, its folder is removed when a process of
    the same user creates the next temporary folder.

    Args:
        name: Part of the folder's name.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self, name: str) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
            with suppress(FileNotFoundError):  # another process may remove the folder before it is locked
                descriptor = _lock(self.path / _LOCK)
                break
        _temporary.add(self.path)
        self._finalizer = weakref.finalize(self, _leave, self.path, descriptor)

    def cleanup(self) -> None:
        """Remove the folder now."""
        self._finalizer()


@contextmanager
def private_temporary_folder() -> Iterator[None]:
    """Temporarily use a new folder as the temporary directory, also in other libraries and in child processes.

    The folder is removed after the block. If the process is killed, a later process removes the folder.
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
    """Remove the temporary files and folders of this process. Call this before an exit that skips all other cleanup."""
    for path in [*_temporary]:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    _temporary.discard(path)


def _leave(path: Path, descriptor: int | None) -> None:
    if path in _temporary:  # False in a forked process, which also runs the finalizers of its parent
        _remove(path)
    if descriptor is not None:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove temporary folders of the current user that no process locks, because their process was killed."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # the process still runs, or has removed the folder in the meantime
            if folder.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(descriptor)


def _lock(path: Path, wait: bool = True) -> int | None:
    """Create and lock a file, and return the descriptor of the file.

    The file is unlocked when the descriptor is closed or the process ends. Return None if the system or the file system
    does not support locks. If another process has locked the file, wait for the lock, or with ``wait=False`` raise
    InvalidValueError.
    """
    if sys.platform == "win32":
        return None
    while True:
        if path.is_symlink():  # the process must not write to the target of a link
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace") or "with unknown ID"
            os.close(descriptor)
            raise InvalidValueError(
                f"Expected one process to train in {path.parent}, but process {owner} is already training there.",
                hint="Wait until that process ends, or use another folder with `--out`.",
            ) from None
        except OSError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        os.close(descriptor)  # another process renamed or removed the file before it was locked, so try again
