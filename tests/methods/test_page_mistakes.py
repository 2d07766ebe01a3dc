"""Tests that the mistakes in `docs/add-a-method.md` give the errors that the page contains."""

from pathlib import Path

import pytest
import torch

from lightning_fcl.conformance import run_statements
from lightning_fcl.methods import Method

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text()
ROWS = [line for line in PAGE.partition("## Common mistakes")[2].partition("\n## ")[0].splitlines() if "|" in line][2:]


class Total(Method):
    """A method with the server state `total`, shape (3,)."""

    def init_server_state(self, module):
        return {"total": torch.zeros(3)}


class PerSample(Method):
    def penalty(self, client, step):
        return step.output.square().mean(dim=1)


class NoReturn(Method):
    def update_client_state(self, client, trained_state, data):
        client.method_state["count"] = torch.ones(())


class Number(Method):
    def update_client_state(self, client, trained_state, data):
        return {"count": 3}


class OtherName(Total):
    def upload_statistics(self, client, trained_state, data):
        return {"totals": torch.ones(3)}


class OtherShape(Total):
    def upload_statistics(self, client, trained_state, data):
        return {"total": torch.ones(4)}


class NoServerState(Method):
    def upload_statistics(self, client, trained_state, data):
        return {"total": torch.ones(3)}


class OtherParameter(Method):
    def process_aggregate(self, server):
        return {"head.weight": torch.zeros(1)}


class Misspelled(Method):
    def update_client_states(self, client, trained_state, data):
        return {}


class NoSamples(Method):
    def update_client_state(self, client, trained_state, data):
        return {"mean": data[0].mean(dim=0)}


class OtherEntries(Method):
    def penalty(self, client, step):
        return sum(value.sum() for value in client.method_state.values())

    def update_client_state(self, client, trained_state, data):
        return {"w": torch.ones(1)} if client.client_round.client_id == "0" else {}


class WrongPattern(Total):
    reductions = {"sum": "sum"}  # noqa: RUF012


@pytest.mark.parametrize(
    "kind",
    [
        *(PerSample, NoReturn, Number, OtherName, OtherShape, NoServerState, OtherParameter, Misspelled, NoSamples),
        *(OtherEntries, WrongPattern),
    ],
)
def test_mistake_of_page_raises_error_of_page(fit, make_stream, make_task, kind):
    with pytest.raises((ValueError, TypeError)) as caught:
        fit(make_task(), make_stream(), [kind()], max_vectorized_clients=3)
    (row,) = [row for row in ROWS if f"({kind.__name__})" in row]
    assert row.split("|")[2].strip() in str(caught.value)


class AttributeState(Method):
    """A method that counts clients in an attribute instead of the client state."""

    def __init__(self, clients="all"):
        super().__init__(clients)
        self.count = 0

    def penalty(self, client, step):
        return 0.01 * self.count * sum(value.square().sum() for value in step.params.values())

    def update_client_state(self, client, trained_state, data):
        self.count += 1
        return {}


class GlobalRandom(Method):
    def penalty(self, client, step):
        return 0.1 * torch.rand(()) * sum(value.square().sum() for value in step.params.values())


@pytest.mark.seconds
@pytest.mark.parametrize("kind", [AttributeState, GlobalRandom])
def test_mistake_of_page_fails_conformance(kind):
    (row,) = [row for row in ROWS if f"({kind.__name__})" in row]
    failed = [statement.description for statement, outcome in run_statements(kind) if outcome.result == "fails"]
    assert f"conformance fails: {'; '.join(failed)}" == row.split("|")[2].strip()


def test_page_mistakes_have_tests():
    names = {name for name in globals() if f"({name})" in " ".join(ROWS)}
    assert len(names) == len(ROWS) == 13


def test_conformance_invalid_hook_fails_instead_of_not_tried():
    outcomes = {outcome.result for _, outcome in run_statements(Number)}
    assert "fails" in outcomes and "not tried" not in outcomes
