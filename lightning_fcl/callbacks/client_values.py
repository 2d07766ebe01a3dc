"""Values of the clients of a round in loggers: statistics as scalars, and the value of each client in a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_fcl.federation.protocols import find_federation

TABLE = "clients"
"""Name of the table in W&B, of the folder of the tables in MLflow, and of the statistics."""

_STATISTICS = ("mean", "min", "max", "std")


def log_round(
    trainer: L.Trainer, module: L.LightningModule, tested: Mapping[str, Mapping[str, float]], experience_idx: int
) -> None:
    """Log the values of a round: values of the server, and values and training losses of the clients.

    All loggers get the mean, minimum, maximum and standard deviation (divided by n) over the clients, for example
    as ``clients/accuracy_mean``. With differential privacy, they also get ``privacy/epsilon``. W&B and MLflow also
    get a table with one row for each client, and TensorBoard gets a histogram of each quantity. Callbacks such as
    `EarlyStopping` can also monitor the values of each client.

    Args:
        trainer: The Trainer.
        module: The module.
        tested: For each tested model, the values of the model by the name of the quantity.
        experience_idx: Experience of the server. MLflow gets one table for each experience.
    """
    for model, values in tested.items():
        named_values = {f"{model}/{name}": value for name, value in values.items()}
        module.log_dict(named_values, logger=model == "server", on_step=False, on_epoch=True, batch_size=1)
    federation = find_federation(trainer)
    if federation is None:
        return
    if (epsilon := federation.epsilon) is not None:
        module.log("privacy/epsilon", epsilon, on_step=False, on_epoch=True, batch_size=1)
    losses = federation.server.record.train_losses
    rows = {
        client: {**tested.get(client, {}), **({"train_loss": losses[client].mean} if client in losses else {})}
        for client in federation.stream.plan.clients
        if client in tested or client in losses
    }
    names = list(dict.fromkeys(name for values in rows.values() for name in values))
    columns = {name: [values.get(name) for values in rows.values()] for name in names}
    for name, column in columns.items():
        numbers = np.array([number for number in column if number is not None])
        statistics = {f"{TABLE}/{name}_{kind}": float(getattr(numbers, kind)()) for kind in _STATISTICS}
        module.log_dict(statistics, on_step=False, on_epoch=True, batch_size=1)
    if columns and trainer.is_global_zero:
        for logger in trainer.loggers:
            _log_table(logger, list(rows), columns, trainer.current_epoch, experience_idx)


def _log_table(
    logger: Logger,
    clients: Sequence[str],
    columns: Mapping[str, Sequence[float | None]],
    round_idx: int,
    experience_idx: int,
) -> None:
    """Log the values of each client to a logger that has tables or histograms."""
    if isinstance(logger, WandbLogger):
        rows = [list(row) for row in zip(clients, *columns.values(), strict=True)]
        logger.log_table(TABLE, ["client", *columns], rows, step=round_idx)
    elif isinstance(logger, MLFlowLogger):
        table = {"round": [round_idx] * len(clients), "client": [_mlflow_id(client) for client in clients], **columns}
        # MLflow stores the paths of all tables in one tag of limited length. Therefore a table contains all rounds of
        # an experience.
        with _without_progress_bar():
            logger.experiment.log_table(logger.run_id, table, f"{TABLE}/experience-{experience_idx}.json")
    elif isinstance(logger, TensorBoardLogger):
        for name, column in columns.items():
            finite_numbers = [number for number in column if number is not None and np.isfinite(number)]
            if finite_numbers:
                logger.experiment.add_histogram(f"{TABLE}/{name}", np.array(finite_numbers), round_idx)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Temporarily disable the progress bar that MLflow shows when it appends rows to a table."""
    variable = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
    previous = os.environ.get(variable)
    os.environ.setdefault(variable, "false")
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(variable, None)


def _mlflow_id(client: str) -> str:
    """Return a client id that MLflow does not convert to a number. It would read ``"01"`` from a table as 1."""
    with suppress(ValueError):
        float(client)
        return f"client {client}"
    return client
