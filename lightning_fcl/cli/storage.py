"""Storages of Optuna, which several processes and machines can share."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)

from lightning_fcl.errors import ConnectionFailedError, InvalidValueError, MissingFileError, MissingPackageError
from lightning_fcl.io.reading import read_text
from lightning_fcl.library_errors import one_line

_HINT = "Use a URL such as `sqlite:///study.db`, or a file such as `study.log` for a folder that machines share."
_NUM_ATTEMPTS = 5


def open_storage(text: str) -> BaseStorage:
    """Open the storage of an Optuna study.

    Args:
        text: URL of a database, such as ``sqlite:///study.db``, or the path of a file for Optuna's JournalStorage.

    Raises:
        InvalidValueError: If the text is not a valid URL, or the file is not a journal.
        MissingPackageError: If the driver of the database is not installed.
        MissingFileError: If the folder of the file does not exist.
        ConnectionFailedError: If the database cannot be reached.
    """
    if "://" not in text:
        return _open_journal(Path(text))
    url = without_password(text)
    with warnings.catch_warnings(), storage_errors(text):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            if make_url(text).database in (None, "", ":memory:") and text.startswith("sqlite"):
                raise InvalidValueError(
                    f"Expected `--storage` to be a database that processes can share, but {url} is in memory.",
                    hint="Use a file, as in `--storage sqlite:///study.db`.",
                    argument="--storage",
                    value=url,
                )
            # SQLite waits for the lock of another process.
            arguments = {"connect_args": {"timeout": 60}} if text.startswith("sqlite") else {}
            for attempt in range(_NUM_ATTEMPTS):
                try:
                    # All studies of this process share one cache of trials.
                    return get_storage(RDBStorage(text, engine_kwargs=arguments))
                except (OperationalError, ProgrammingError, IntegrityError):
                    # Two processes can create the tables of a new database at the same time.
                    if attempt == _NUM_ATTEMPTS - 1 or not _has_tables(text):
                        raise
                    time.sleep(0.2)
        except ImportError as error:
            driver = make_url(text).drivername
            reason = one_line(error.__cause__ or error)
            raise MissingPackageError(
                f"Expected the driver of the database {url}, but Python cannot import it: {reason}.",
                hint=f"Install the package of the SQLAlchemy driver {driver}, or use `--storage sqlite:///study.db`.",
                argument="--storage",
                value=url,
            ) from error
        except ArgumentError as error:
            raise InvalidValueError(
                f"Expected `--storage` to be the URL of a database, but got {url}: {one_line(error)}.",
                hint=_HINT,
                argument="--storage",
                value=url,
            ) from error
    raise AssertionError("the loop returns or raises")


def _has_tables(url: str) -> bool:
    """Return whether a database can be reached and has a table of Optuna."""
    try:
        return inspect(create_engine(url)).has_table("studies")
    except SQLAlchemyError:
        return False


def _open_journal(path: Path) -> JournalStorage:
    if path.suffix in (".db", ".sqlite", ".sqlite3"):
        raise InvalidValueError(
            f"Expected `--storage` to be a URL, or a file for Optuna's JournalStorage, but got {path}.",
            hint=f"For an SQLite database, use `--storage sqlite:///{path}`.",
            argument="--storage",
            value=str(path),
        )
    if path.is_dir() or not path.parent.is_dir():
        raise MissingFileError(
            f"Expected `--storage` to be a file in an existing folder, but got {path}.",
            hint=_HINT,
            argument="--storage",
            value=str(path),
        )
    try:
        # JournalStorage ignores an invalid last line, and would append to a file of another kind.
        first_line = read_text(path).partition("\n")[0] if path.exists() else ""
        if first_line:
            _ = json.loads(first_line)["op_code"]
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"Expected {path} to be a file of Optuna's JournalStorage, but reading it failed: {one_line(error)}.",
            hint=_HINT,
            argument="--storage",
            value=str(path),
        ) from error


def without_password(text: str) -> str:
    """Return the URL of a database without its password. A text that is no URL is returned unchanged.

    Example:
        >>> without_password("postgresql://me:secret@host/db")
        'postgresql://me:***@host/db'
    """
    try:
        return make_url(text).render_as_string(hide_password=True) if "://" in text else text
    except ArgumentError:
        return text.rpartition("@")[2]


@contextmanager
def storage_errors(text: str | None) -> Iterator[None]:
    """Convert errors of a database in the block to a ConnectionFailedError that names the database.

    Args:
        text: URL or path of the storage. None if the storage is in memory.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        if isinstance(error, ArgumentError):
            raise
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        # SQLAlchemy appends the statement and a link to the error of the driver.
        reason = one_line((cause.orig or cause) if isinstance(cause, DBAPIError) else cause)
        raise ConnectionFailedError(
            f"Expected to reach the database {without_password(text or '')}, but got: {reason}.",
            hint="Check the URL of `--storage`. A server must accept connections, and the folder of an SQLite file "
            "must exist. Then run the same command again.",
            argument="--storage",
            value=without_password(text or ""),
        ) from error
