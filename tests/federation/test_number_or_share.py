"""Tests of arguments that take a number or a fraction: the integer 1 logs a warning if 1.0 has another meaning."""

import logging

import pytest

from lightning_fcl.callbacks import AGEM, BCN, GEM, DyToxMethod, Replay
from lightning_fcl.cli.main import main
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.fedbuff import FedBuff
from lightning_fcl.federation.synchronization import Deadline, Participation
from lightning_fcl.models import EchoStateNetwork

MAX_SIZE = "`memory_size` is the integer 1, which means 1 sample. Write 1.0 for all samples."
BATCH = "`{}` is the integer 1, which means {}. Write 1.0 for all batches."
CLIENT = "`participation` is the integer 1, which means 1 of 5 clients per round. Write 1.0 for all clients."


@pytest.fixture
def warnings_of(caplog):
    """Return a function that calls a given function and returns the logged warnings about the integer 1."""

    def find(function, *args, **kwargs):
        caplog.clear()
        function(*args, **kwargs)
        return [record.message for record in caplog.records if "is the integer 1" in record.message]

    return find


@pytest.mark.parametrize("kind", [Replay, GEM, AGEM, BCN, DyToxMethod])
def test_memory_size_integer_one_warns_once(kind, warnings_of):
    assert warnings_of(kind, memory_size=1) == [MAX_SIZE]
    assert warnings_of(kind, memory_size=1.0) == warnings_of(kind, memory_size=2) == warnings_of(kind) == []


def test_connectivity_integer_one_warns_once(warnings_of):
    names = {"input_connectivity": "all inputs", "recurrent_connectivity": "all units"}
    for (name, share), seed in zip(names.items(), (0, 3), strict=True):
        options = {"units": 4, "num_layers": 2, "seed": seed}
        (message,) = warnings_of(EchoStateNetwork, 3, **options, **{name: 1})
        assert message.startswith(f"`{name}` is the integer 1, which means 1 ") and message.endswith(
            f"1.0 for {share}."
        )
        assert warnings_of(EchoStateNetwork, 3, **options, **{name: 1.0}) == []
        assert warnings_of(EchoStateNetwork, 3, **options, **{name: 2}) == []
    # With a single input or a single unit, 1 and 1.0 have the same meaning.
    assert warnings_of(EchoStateNetwork, 1, units=4, input_connectivity=1) == []
    assert warnings_of(EchoStateNetwork, 3, units=1, recurrent_connectivity=1) == []


@pytest.mark.seconds
def test_fit_integer_one_warns_once_per_argument(fit, make_task, make_stream, warnings_of):
    def trained(clients=5, participation=1.0, **options):
        stream = make_stream(num_clients=clients, num_experiences=1)
        return warnings_of(fit, make_task(), stream, max_epochs=1, participation=participation, trainer_args=options)

    assert trained(participation=1) == [CLIENT]
    assert trained(limit_train_batches=1) == [BATCH.format("limit_train_batches", "1 batch per client and round")]
    assert trained(overfit_batches=1) == [BATCH.format("overfit_batches", "1 batch per client and round")]
    assert trained(limit_val_batches=1) == [BATCH.format("limit_val_batches", "1 batch")]
    assert trained() == trained(participation=2) == trained(limit_train_batches=1.0, limit_val_batches=2) == []
    assert trained(fast_dev_run=True) == trained(clients=1, participation=1) == []


@pytest.mark.parametrize(
    ("clients", "schedule", "described"),
    [
        (1, None, "1 of 10 clients per round"),
        (1.0, None, "10 of 10 clients per round"),
        (0.25, None, "3 of 10 clients per round"),
        (99, None, "10 of 10 clients per round"),
        (4, Deadline(ClientSpeeds(0.01), 3), "4 of 10 clients per round"),
        (4, FedBuff(ClientSpeeds(0.01), 2), "4 of 10 clients at any time"),
    ],
)
def test_participation_describe_returns_number_of_clients(clients, schedule, described):
    assert Participation(clients, synchronization=schedule).describe(10) == described


@pytest.mark.seconds
def test_fit_logs_participation_at_start(fit, make_task, make_stream, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(caplog.handler)
    try:
        fit(make_task(), make_stream(num_clients=5, num_experiences=1), max_epochs=1, participation=0.4)
    finally:
        logger.removeHandler(caplog.handler)
    assert "Federation: 2 of 5 clients per round" in {record.message for record in caplog.records}


@pytest.mark.seconds
@pytest.mark.parametrize(("given", "number", "warns"), [("1", 1, True), ("1.0", 10, False)])
def test_validate_and_fit_print_participation(given, number, warns, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    words = ["quickstart", "--data.partition.num_clients", "10", "--trainer.strategy.participation", given]
    for command, more, line in (
        ("validate", [], f"training   {number} of 10 clients per round"),
        ("fit", ["--trainer.max_epochs", "1", "--out", "out"], f"Federation: {number} of 10 clients per round"),
    ):
        caplog.clear()
        main([command, *words, *more])
        assert line in capsys.readouterr().out.splitlines()
        warned = [record.message for record in caplog.records if "is the integer 1" in record.message]
        assert warned == [CLIENT.replace("5", "10")] * warns
