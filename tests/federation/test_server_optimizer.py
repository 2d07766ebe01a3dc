"""Tests of server optimizers, compared with the formulas of their papers."""

import copy

import torch

from lightning_fcl.federation.server_optimizer import ServerOptimizer


def random_uploads(clients, shape):
    return list(torch.randn(clients, *shape, generator=torch.Generator().manual_seed(0)))


def rounds(optimizer, aggregates, server):
    """Return the server's parameter after each round."""
    states = []
    for value in aggregates:
        server = optimizer.step({"w": server}, {"w": value})["w"]
        states.append(server)
    return states


def test_sgd_with_learning_rate_one_equals_fedavg():
    server, aggregates = torch.randn(4), random_uploads(3, (4,))
    optimizer = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=1.0), ["w"])
    for result, expected in zip(rounds(optimizer, aggregates, server), aggregates, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_sgd_with_momentum_equals_fedavgm():
    server, aggregates = torch.randn(4, dtype=torch.float64), [u.double() for u in random_uploads(3, (4,))]
    optimizer = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9), ["w"])
    w, v = server.clone(), torch.zeros(4, dtype=torch.float64)
    for result, value in zip(rounds(optimizer, aggregates, server), aggregates, strict=True):
        # Compute the update of FedAvgM (Hsu et al., 2019).
        v = 0.9 * v + (w - value)
        w = w - 0.7 * v
        torch.testing.assert_close(result, w, rtol=0, atol=1e-12)


def test_adam_equals_fedadam():
    server, aggregates = torch.randn(4, dtype=torch.float64), [u.double() for u in random_uploads(3, (4,))]
    optimizer = ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3), ["w"])
    w, m, v = server.clone(), 0.0, 0.0
    for t, (result, value) in enumerate(zip(rounds(optimizer, aggregates, server), aggregates, strict=True), start=1):
        m = 0.9 * m + 0.1 * (w - value)
        v = 0.99 * v + 0.01 * (w - value) ** 2
        w = w - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
        torch.testing.assert_close(result, w, rtol=0, atol=1e-12)


def test_server_optimizer_resumed_is_bitwise_identical():
    def make():
        return ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1), ["w"])

    server, aggregates = torch.randn(4), random_uploads(4, (4,))
    whole, first = make(), make()
    expected = rounds(whole, aggregates, server)
    middle = rounds(first, aggregates[:2], server)[-1]
    second = make()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    # A checkpoint that is saved between loading the state and the next step is complete.
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()
    assert torch.equal(rounds(second, aggregates[2:], middle)[-1], expected[-1])
    assert not torch.equal(rounds(make(), aggregates[2:], middle)[-1], expected[-1])


def test_server_optimizer_buffers_take_aggregate():
    server = {"w": torch.zeros(2), "running": torch.zeros(2), "count": torch.tensor(3)}
    target = {"w": torch.ones(2), "running": torch.full((2,), 5.0), "count": torch.tensor(8)}
    result = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=0.5), ["w"]).step(server, target)
    assert result["w"].tolist() == [0.5, 0.5]
    assert result["running"].tolist() == [5, 5] and result["count"].item() == 8
    assert server["w"].tolist() == [0, 0] and target["w"].tolist() == [1, 1]
