"""Tests of FedNova: the paper's formula for one round, and a fixed point that does not depend on local steps."""

import numpy as np
import pytest
import torch
from raising import raises

from lightning_fcl.callbacks import ContinualMetrics, FedNova
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.methods import Method

from .quadratics import CURVATURES, TARGETS, clients, minimum, quadratic, slope, slope_clients, value

SAMPLES = np.array([4, 8, 16, 32])
# Number of steps per epoch of each client, with batches of 4 samples.
STEPS = SAMPLES // 4


def step_of(client, w, steps, lr, momentum):
    """Return the parameter of a client after some steps from the start value ``w``."""
    velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + CURVATURES[client] * (w - TARGETS[client])
        w = w - lr * velocity
    return w


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_fednova_round_equals_paper_formula(fit, weights, momentum):
    """The new model is x + tau_eff * sum_k p_k (y_k - x) / |a_k|_1, with tau_eff = sum_k p_k |a_k|_1.

    The server's model before the round is x. Client k has the weight p_k and the trained model y_k. The vector a_k has
    the coefficients of the client's steps.
    """
    task = quadratic(lr=0.02, momentum=momentum)
    fit(task, clients(1, SAMPLES), [FedNova()], client_weights=weights, seed=0)
    p = SAMPLES / SAMPLES.sum() if weights == "samples" else np.full(4, 0.25)
    norms = np.array([sum((1 - momentum**i) / (1 - momentum) for i in range(1, n + 1)) for n in STEPS])
    ends = np.array([step_of(k, 2.0, n, 0.02, momentum) for k, n in enumerate(STEPS)])
    assert value(task) == pytest.approx(2.0 + (p * norms).sum() * (p * (ends - 2.0) / norms).sum(), abs=1e-5)


def fixed_point(weights, lr):
    """Return the w at which sum_k p_k (1 - (1 - lr a_k)^tau_k) (b_k - w) is 0.

    Client k has the weight p_k, the curvature a_k, the target b_k and tau_k local steps.
    """
    reach = weights * (1 - (1 - lr * CURVATURES) ** STEPS)
    return (reach * TARGETS).sum() / reach.sum()


def test_fednova_fixed_point_does_not_depend_on_steps(fit):
    """With small steps, FedNova minimizes sum_k p_k L_k. FedAvg minimizes sum_k p_k tau_k L_k.

    Client k has the loss L_k, the weight p_k and tau_k local steps.
    """
    for methods, weights in (([FedNova()], 1 / STEPS), ([], np.ones(4))):
        task = quadratic(lr=0.05)
        fit(task, clients(45, SAMPLES), methods, client_weights="uniform", seed=0)
        assert value(task) == pytest.approx(fixed_point(weights, 0.05), abs=1e-4)
    assert fixed_point(1 / STEPS, 1e-6) == pytest.approx(minimum(), abs=1e-4)
    assert fixed_point(np.ones(4), 1e-6) == pytest.approx(minimum(STEPS), abs=1e-4)
    assert abs(minimum() - minimum(STEPS)) > 0.3


def test_fednova_uploads_one_number_more_and_skips_local_parameters(fit, make_stream, make_task):
    records, own = [], []
    for methods in ([FedNova()], []):
        metrics = ContinualMetrics()
        options = {"reductions": {"model.3.*": "local"}, "seed": 0, "local_epochs": 2, "max_vectorized_clients": 1}
        trainer = fit(make_task(), make_stream(), [*methods, metrics], max_epochs=1, **options)
        records.append(metrics.record["rounds"][0])
        own.append(trainer.strategy.server.client_store["1"]["model"])
    for client in "012":
        assert records[0]["upload_bytes"][client] == records[1]["upload_bytes"][client] + 4
    torch.testing.assert_close(*own, rtol=0, atol=0)


def test_transform_upload_vectorizes_only_if_declared(fit, make_stream, make_task, assert_same):
    class Halves(Method):
        def transform_upload(self, client, trained_state):
            return {name: (value + client.received_state[name]) / 2 for name, value in trained_state.items()}

    class Together(Halves):
        vectorizable = True

    tasks = [make_task() for _ in range(3)]
    for task, method, several in zip(tasks, (Halves(), Together(), FedNova()), (False, True, True), strict=True):
        trainer = fit(task, make_stream(partition="dirichlet"), [method], seed=0)
        assert (trainer.strategy.num_vectorized_clients > 1) == several
    assert_same(*tasks[:2], 1e-5)
    with raises(InvalidValueError, "max_vectorized_clients"):
        fit(make_task(), make_stream(), [Halves()], max_vectorized_clients=2)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.7}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_fednova_linear_losses_move_by_weighted_gradients(fit, options, weights):
    """With the losses <g_k, w>, a round changes w by -lr tau sum_k p_k g_k, up to rounding in double precision."""
    gradients, samples, lr = np.random.default_rng(0).integers(-9, 10, (3, 3)) / 8, np.array([4, 8, 20]), 0.1
    task = slope(lr, **options)
    start = task.model.weight.detach().clone()
    trainer = fit(task, slope_clients(gradients, samples, rounds=1), [FedNova()], client_weights=weights, seed=0,
                  keep_optimizer_state=not options, trainer_args={"precision": "64-true"})  # fmt: skip
    momentum, tau = options.get("momentum", 0.0), []
    for steps in samples // 4:
        sums = [sum(momentum**power for power in range(step + 1)) for step in range(steps)]
        tau.append(sum(1 + momentum * value for value in sums) if options.get("nesterov") else sum(sums))
    p = samples / samples.sum() if weights == "samples" else np.full(3, 1 / 3)
    expected = start - lr * float(p @ tau) * torch.from_numpy(p @ gradients)
    torch.testing.assert_close(task.model.weight.detach(), expected, rtol=0, atol=1e-12)
    kept_tau = trainer.strategy.server.get_section("FedNova")["tau"]
    assert kept_tau.dtype == torch.float64 and float(kept_tau) == pytest.approx(float(p @ tau), rel=1e-12)


def test_fednova_unsupported_optimizers_raise(fit, make_stream, make_task):
    def groups(params):
        first, *others = params
        return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)

    with raises(InvalidValueError, "optimizer", value="SGD"):
        fit(make_task(groups), make_stream(), [FedNova()])
    damped, kept = ({"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9})
    for options, keeps in ((damped, False), (kept, True)):
        task = make_task(lambda params, options=options: torch.optim.SGD(params, lr=0.1, **options))
        with raises(InvalidValueError, "optimizer", value="SGD"):
            fit(task, make_stream(), [FedNova()], keep_optimizer_state=keeps)
    adam = make_task(lambda params: torch.optim.Adam(params))
    fit(adam, make_stream(), [FedNova()], keep_optimizer_state=True, max_epochs=1)


def test_fednova_with_leaving_nodes_trains(fit, make_stream, make_task):
    fit(make_task(), make_stream(), [FedNova()], swarm=Swarm(leaves_at={"1": 1}))
