"""Tests of the server: entries that the module does not have, checkpoints, and checks of uploads."""

import copy

import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import GatheringAccumulator
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.compression import TopK
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.server import FederatedServer

EXTRA = {
    "Method.counts": (torch.tensor([10.0, 0.0, 0.0]), "sum"),
    "Method.prototypes": (torch.full((3, 2), 9.0), "sparse_mean"),
}
SENT = {
    "Method.counts": torch.tensor([[1.0, 2.0, 0.0], [0.0, 5.0, 0.0]]),
    "Method.prototypes": torch.tensor([[[1.0, 1.0], [2.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [5.0, 1.0], [0.0, 0.0]]]),
}


def make_server(**kwargs):
    torch.manual_seed(0)
    return FederatedServer(ClientStore(), **kwargs), nn.Linear(3, 2)


def one_round(server, module, round_idx=0, extra=EXTRA, sent=SENT, weights=(1, 2)):
    """Run a round of two clients. Return the states that the clients download, and the server's new state."""
    server.start_round(module, extra_tensors=extra)
    received, _ = server.download(["a", "b"])
    shift = {
        name: torch.stack([torch.full_like(p, row + round_idx) for row in range(2)])
        for name, p in module.state_dict().items()
    }
    states = {name: value + server.state[name] for name, value in shift.items()}
    client_rounds = [ClientRound(client, round_idx, num_samples=n) for client, n in zip("ab", weights, strict=True)]
    assert server.upload(client_rounds, {**states, **sent}) == [True, True]
    for row, client in enumerate("ab"):
        server.save_client_state(client, {name: value[row] for name, value in {**states, **sent}.items()}, {})
    result = server.aggregate()
    with torch.no_grad():
        module.load_state_dict({name: result[name] for name in module.state_dict()})
    return received, result


def test_extra_entries_are_downloaded_and_aggregated():
    server, module = make_server()
    received, result = one_round(server, module)
    # Clients start at zero for an entry that is summed.
    for state in received:
        assert state["Method.counts"].tolist() == [0, 0, 0] and (state["Method.prototypes"] == 9).all()
    assert result["Method.counts"].tolist() == [11, 7, 0]
    # One client has samples of the first class. Both clients (weights 1 and 2) have samples of the second class. No
    # client has samples of the third class.
    assert result["Method.prototypes"].tolist() == [[1, 1], [4, 2], [9, 9]]
    assert server.extra_tensors == {name: result[name] for name in EXTRA} and server.state is result
    # No entry is client-local.
    assert set(server.client_store) == set()


def test_extra_entries_keep_values_between_rounds_and_fits():
    server, module = make_server()
    one_round(server, module)
    received, result = one_round(server, module, round_idx=1)
    assert received[0]["Method.prototypes"].tolist() == [[1, 1], [4, 2], [9, 9]]
    assert result["Method.counts"].tolist() == [12, 14, 0]
    server.start_fit(module, extra_tensors={name: (-value, reduction) for name, (value, reduction) in EXTRA.items()})
    # A second fit continues with the values of the first fit.
    assert server.state["Method.counts"].tolist() == [12, 14, 0]
    server.start_round(module)
    assert set(server.state) == {"weight", "bias"} and server.extra_tensors["Method.counts"].tolist() == [12, 14, 0]
    assert EXTRA["Method.counts"][0].tolist() == [10, 0, 0]


def test_extra_entries_do_not_change_module_but_count_bytes():
    results = []
    for extra, sent in ((None, {}), (EXTRA, SENT)):
        server, module = make_server(server_optimizer=lambda params: torch.optim.Adam(params, lr=0.1))
        for round_idx in range(3):
            one_round(server, module, round_idx, extra, sent)
        results.append((copy.deepcopy(module.state_dict()), server.record))
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    plain, more = (record for _, record in results)
    # Clients do not download a sum. They upload 3 counts, 1 bit for each of 6 prototype elements, and nonzero elements.
    sparse = [1 + 4 * int(row.count_nonzero()) for row in SENT["Method.prototypes"]]
    for client, own in zip("ab", sparse, strict=True):
        assert more.upload_bytes[client] - plain.upload_bytes[client] == 3 * 4 + min(own, 24)
        assert more.download_bytes[client] - plain.download_bytes[client] == 24


def test_extra_entries_are_not_compressed():
    server, module = make_server(transforms=[TopK(0.3)])
    extra = {"Method.mean": (torch.zeros(100), "mean")}
    sent = {"Method.mean": torch.arange(200.0).view(2, 100)}
    _, result = one_round(server, module, extra=extra, sent=sent, weights=(1, 1))
    assert torch.equal(result["Method.mean"], sent["Method.mean"].mean(dim=0))


def test_extra_entries_without_usable_upload_are_unchanged():
    server, module = make_server()
    server.start_round(module, extra_tensors=EXTRA)
    states = {name: value[None] for name, value in server.state.items()}
    bad = {**states, "Method.counts": torch.tensor([[1.0, float("nan"), 0.0]])}
    assert server.upload([ClientRound("a", round_idx=0, num_samples=1)], bad) == [False]
    assert server.record.dropped == {"a": "non-finite: Method.counts"}
    assert server.aggregate()["Method.counts"].tolist() == [10, 0, 0] == server.extra_tensors["Method.counts"].tolist()


def test_load_state_dict_of_earlier_version_has_no_extra_entries():
    server, module = make_server()
    one_round(server, module)
    kept = server.state_dict()
    assert kept.pop("extra").keys() == EXTRA.keys()
    server.load_state_dict(kept)
    assert server.extra_tensors == {}


@pytest.mark.parametrize("clients", [None, 3, {"x": 3}, {"a": {"model": 3}}])
def test_load_state_dict_invalid_clients_raises_and_keeps_store(clients):
    server, _ = make_server()
    server.client_store["a"] = {"model": {"bias": torch.ones(2)}}
    kept = server.state_dict()
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "clients"):
        server.load_state_dict({**kept, "clients": clients})
    assert server.state_dict()["clients"].keys() == {"a"}


def test_extra_entry_with_custom_reduction():
    class Last(Reduction):
        """A reduction whose result is the last upload. Clients start at -1."""

        name = "last"
        is_downloaded = False

        def initial_value(self, server):
            return torch.full_like(server, -1)

        def make_accumulator(self):
            return GatheringAccumulator(lambda rows, server: {name: row[-1] for name, row in rows.items()})

    server, module = make_server()
    received, result = one_round(
        server, module, extra={"Method.last": (torch.zeros(2), Last())}, sent={"Method.last": torch.eye(2)}
    )
    assert received[0]["Method.last"].tolist() == [-1, -1] and result["Method.last"].tolist() == [0, 1]


class InOrder(Reduction):
    """A reduction that concatenates all uploads in the order of the clients."""

    name = "in_order"

    def make_accumulator(self):
        return GatheringAccumulator(lambda rows, server: {name: torch.cat(row) for name, row in rows.items()})


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "a", "b"]])
def test_uploads_are_aggregated_in_order_of_client_index(order):
    server, module = make_server()
    server.client_index = {"c": 0, "a": 1, "b": 2}
    server.start_fit(module, extra_tensors={"Method.rows": (torch.zeros(3, 1), InOrder())})
    states = {name: value.detach()[None] for name, value in module.state_dict().items()}
    for client in order:
        rows = torch.full((1, 1, 1), float(server.client_index[client]))
        server.upload([ClientRound(client, round_idx=0, num_samples=3)], {**states, "Method.rows": rows})
    assert server.aggregate()["Method.rows"].flatten().tolist() == [0, 1, 2]


def test_client_index_has_order_of_stream(fit, make_stream, make_task):
    stream = make_stream()
    trainer = fit(make_task(), stream, max_epochs=1)
    assert list(trainer.strategy.server.client_index) == list(stream.plan.clients)


def test_extra_entry_can_be_client_local():
    server, module = make_server()
    extra = {"Method.own": (torch.zeros(1), "local")}
    for round_idx in range(2):
        received, result = one_round(server, module, round_idx, extra, {"Method.own": torch.tensor([[3.0], [4.0]])})
    assert [state["Method.own"].item() for state in received] == [3, 4] and result["Method.own"].item() == 0


def test_extra_entry_with_name_of_module_entry_raises():
    server, module = make_server()
    with raises(InvalidValueError, "weight"):
        server.start_round(module, extra_tensors={"weight": (torch.zeros(1), "sum")})


def test_upload_without_extra_entries_raises():
    server, module = make_server()
    server.start_round(module, extra_tensors=EXTRA)
    states = {name: value[None] for name, value in module.state_dict().items()}
    with raises(InvalidValueError, "Method.counts"):
        server.upload([ClientRound("a", round_idx=0, num_samples=1)], states)


def test_max_update_norm_limits_round_except_sums():
    server, module = make_server()
    server.max_update_norm = 2.0
    counts = {**SENT, "Method.counts": SENT["Method.counts"] * 1e9}
    _, result = one_round(server, module, sent=counts)
    assert result["Method.counts"][1] == 7e9
    server.max_update_norm = 0.01
    with raises(InvalidValueError, "max-update-norm"):
        one_round(server, module)
    assert all(torch.equal(value, server.state[name]) for name, value in module.state_dict().items())
    assert torch.equal(server.extra_tensors["Method.counts"], result["Method.counts"])
