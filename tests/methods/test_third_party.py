"""Tests of methods that are written outside of the library and import only `lightning_fcl.methods`."""

import inspect
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch.func import functional_call, grad, vmap

from lightning_fcl import methods
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods import Method, Needs, flatten, strip_prefix, with_prefix


class Prox(Method):
    """FedProx (Li et al., 2020)."""

    def __init__(self, mu=0.1):
        super().__init__()
        self.mu = mu

    def penalty(self, client, step):
        received = {name: step.received_state[name] for name in step.params}
        return self.mu / 2 * (flatten(step.params) - flatten(received)).square().sum()


class Consolidation(Method):
    """EWC (Kirkpatrick et al., 2017): the Fisher information of earlier experiences weights a quadratic penalty."""

    needs = Needs(round_samples=True, sample_loss=True)

    def __init__(self, strength=1.0):
        super().__init__()
        self.strength = strength

    def prepare_client_state(self, client):
        learnt = {name: client.received_state[name] for name, p in client.module.named_parameters() if p.requires_grad}
        nothing = {name: torch.zeros_like(value) for name, value in learnt.items()}
        return client.method_state or with_prefix(learnt, "center") | with_prefix(nothing, "fisher")

    def penalty(self, client, step):
        center, fisher = strip_prefix(client.method_state, "center"), strip_prefix(client.method_state, "fisher")
        gone = {name: fisher[name] * (value - center[name]).square() for name, value in step.params.items()}
        return self.strength / 2 * flatten(gone).sum()

    def update_client_state(self, client, trained_state, data):
        if not client.client_round.is_last_round:
            return client.method_state
        earlier, module = strip_prefix(client.method_state, "fisher"), client.module
        params = {name: trained_state[name] for name in earlier}

        def loss(params, x, y):
            return module.sample_loss(functional_call(module, {**trained_state, **params}, (x[None],)), y[None]).sum()

        of_samples = vmap(grad(loss), in_dims=(None, 0, 0))(params, *data)
        fisher = {name: value + of_samples[name].square().mean(dim=0) for name, value in earlier.items()}
        return with_prefix(params, "center") | with_prefix(fisher, "fisher")


class Scaffold(Method):
    """SCAFFOLD, option II, with full participation: the gradient is corrected by the difference of control variates."""

    reductions = {"c.*": "mean"}  # noqa: RUF012

    def init_server_state(self, module):
        return with_prefix({n: torch.zeros_like(p) for n, p in module.named_parameters() if p.requires_grad}, "c")

    def prepare_client_state(self, client):
        return client.method_state or {name: torch.zeros_like(value) for name, value in client.server_state.items()}

    def penalty(self, client, step):
        lacking = {
            n: (client.server_state[f"c.{n}"] - client.method_state[f"c.{n}"]) * p for n, p in step.params.items()
        }
        return flatten(lacking).sum()

    def upload_statistics(self, client, trained_state, data):
        rate = client.module.optimizers().param_groups[0]["lr"]
        moved = {f"c.{n}": value - trained_state[n] for n, value in client.received_state.items() if n in trained_state}
        return {
            n: v - client.server_state[n] + moved[n] / (client.num_steps * rate) for n, v in client.method_state.items()
        }

    def update_client_state(self, client, trained_state, data):
        return self.upload_statistics(client, trained_state, data)


class Momentum(Method):
    """FedAvgM (Hsu et al., 2019): momentum on the server."""

    needs, reductions = Needs(federation_reason="it has no server"), {"*": "constant"}

    def init_server_state(self, module):
        return {name: torch.zeros_like(value) for name, value in module.named_parameters()}

    def process_aggregate(self, server):
        for name, velocity in server.server_state.items():
            server.server_state[name] = 0.9 * velocity + server.previous_state[name] - server.state[name]
        return {name: server.previous_state[name] - 0.5 * velocity for name, velocity in server.server_state.items()}


@pytest.mark.parametrize("kind", [Prox, Consolidation, Scaffold, Momentum])
def test_third_party_methods_are_short_and_use_public_names(kind):
    lines = [line for line in inspect.getsource(kind).splitlines() if line.strip()]
    assert len(lines) <= 30
    assert {"Method", "Step", "Client", "Server", "Needs", "strip_prefix", "with_prefix", "flatten"} <= {*dir(methods)}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("theirs", "ours", "experiences"),
    [
        (Prox(0.7), methods.FedProx(0.7), 2),
        (Consolidation(4.0), methods.EWC(4.0, normalize=False), 2),
        # The test has one experience, because the library's SCAFFOLD resets its variates in each experience.
        (Scaffold(), methods.SCAFFOLD(), 1),
    ],
)
def test_third_party_methods_equal_library_methods(
    fit, make_stream, make_task, assert_same, theirs, ours, experiences, size
):
    tasks = [make_task() for _ in range(3)]
    for task, callbacks in zip(tasks, ([theirs], [ours], []), strict=True):
        options = {"local_epochs": 2, "max_vectorized_clients": size, "seed": 0, "client_weights": "uniform"}
        fit(task, make_stream(num_experiences=experiences, rounds_per_experience=3), callbacks, **options)
    assert_same(tasks[0], tasks[1], 1e-5)
    with pytest.raises(AssertionError):
        assert_same(tasks[0], tasks[2], 1e-3)


def test_vectorized_clients_with_different_state_entries_raise(fit, make_stream, make_task):
    class Later(Method):
        def penalty(self, client, step):
            return sum(value.sum() for value in strip_prefix(client.method_state, "own").values())

        def update_client_state(self, client, trained_state, data):
            return with_prefix(trained_state, "own") if client.client_round.client_id == "1" else {}

    with raises(InvalidValueError, "Later", code="invalid-hook"):
        fit(make_task(), make_stream(), [Later()], max_vectorized_clients=3)
    fit(make_task(), make_stream(), [Later()], max_vectorized_clients=1)


@pytest.mark.parametrize("size", [1, 3])
def test_process_aggregate_momentum_equals_server_optimizer(fit, make_stream, make_task, assert_same, size):
    tasks = [make_task() for _ in range(2)]
    fit(tasks[0], make_stream(), [Momentum()], max_vectorized_clients=size)
    momentum = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    fit(tasks[1], make_stream(), max_vectorized_clients=size, server_optimizer=momentum)
    assert_same(*tasks, 1e-6)


def test_process_aggregate_runs_in_order_before_on_round_end(fit, make_stream, make_task):
    """Each method starts from the result of the previous method. No method runs in a round without uploads."""
    seen, turns = [], []

    class Ends(Callback):
        def on_round_end(self, trainer, pl_module):
            seen.append(next(pl_module.parameters()).detach().clone())

    class First(Method):
        def process_aggregate(self, server):
            turns.append(type(self).__name__)
            self.given = next(iter(server.state.values())).detach().clone()
            return {next(iter(server.state)): self.given + 1}

    class Second(First):
        pass

    first, second = First(), Second()
    fit(make_task(), make_stream(num_experiences=1), [Ends(), first, second], participation=1)
    assert turns == ["First", "Second"] and torch.equal(second.given, first.given + 1)
    assert len(seen) == 1 and all(torch.equal(one, second.given + 1) for one in seen)

    class NaN(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            next(pl_module.parameters()).data.fill_(torch.nan)

    fit(make_task(), make_stream(num_experiences=1), [NaN(), First()], on_empty_round="warn", max_vectorized_clients=1)
    assert turns == ["First", "Second"]
