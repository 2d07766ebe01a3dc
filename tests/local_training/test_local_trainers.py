"""Tests of custom local trainers and methods, which users write without changes in the package."""

from collections.abc import Callable, Sequence

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.federation.local_trainer import HasLocalTrainer, LocalResult, LocalTrainer
from lightning_fcl.federation.protocols import HasAggregationHook
from lightning_fcl.methods.method import Method
from lightning_fcl.simulation.federation import Federation


class LeastSquares(L.LightningModule):
    """Linear regression on the labels in closed form. Each client uploads sums, or the client's solution."""

    lightning_fcl_protocols = True

    def __init__(self, share: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.share = share
        self.weight = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        self.register_buffer("gram", torch.zeros(7, 7, dtype=torch.float64))
        self.register_buffer("moment", torch.zeros(7, dtype=torch.float64))

    @property
    def reductions(self) -> dict[str, str]:
        sums = self.share == "sums"
        return {
            "weight": "download_only" if sums else "mean",
            **dict.fromkeys(("gram", "moment"), "sum" if sums else "constant"),
        }

    def forward(self, x: Tensor) -> Tensor:
        return with_one(x) @ self.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise AssertionError("Called `training_step`, although the custom local trainer replaces it.")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.0)

    def configure_local_trainer(self, federation: Federation, shaping: Sequence[str]) -> LocalTrainer:
        if shaping:
            raise ValueError(f"Expected no methods that change the loss, but got {shaping}.")
        size = federation.settings.max_vectorized_clients
        return NormalEquations(self, 2 if size == "auto" else size)

    def on_after_aggregation(self) -> None:
        if self.share == "sums":
            self.weight.data = torch.linalg.solve(self.gram, self.moment)


class NormalEquations:
    """A local trainer that accumulates the normal equations of the samples of several clients."""

    is_stacked = True
    optimizer = None

    def __init__(self, module: LeastSquares, clients_at_once: int) -> None:
        self.module, self.num_vectorized_clients = module, clients_at_once
        self.began = self.finished = 0

    def start(self, clients, states, memories, optimizers) -> None:
        self.began += len(states)
        self.memories = memories
        self.gram = torch.zeros(len(states), 7, 7, dtype=torch.float64)
        self.moment = torch.zeros(len(states), 7, dtype=torch.float64)

    def training_step(self, batch: list[Tensor], batch_idx: int, weight: Tensor | None) -> None:
        x, y = with_one(batch[0]), batch[1].double()
        real = (weight > 0).double()
        self.gram[: len(x)] += torch.einsum("cbi,cbj,cb->cij", x, x, real)
        self.moment[: len(x)] += torch.einsum("cbi,cb,cb->ci", x, y, real)
        self.module.optimizers().step()

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        return step()

    def finish(self) -> LocalResult:
        self.finished += len(self.gram)
        uploads = {
            name: value.expand(len(self.gram), *value.shape) for name, value in state_tensors(self.module).items()
        }
        if self.module.share == "sums":
            return LocalResult({**uploads, "gram": self.gram, "moment": self.moment}, self.memories)
        return LocalResult({**uploads, "weight": torch.linalg.solve(self.gram, self.moment)}, self.memories)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x.double(), torch.ones_like(x[..., :1]).double()], dim=-1)


def solution(stream, rows) -> np.ndarray:
    """Return NumPy's least-squares solution for the given samples of a stream."""
    x, y = stream.get_samples(rows)
    return np.linalg.lstsq(with_one(x).numpy(), y.double().numpy(), rcond=None)[0]


@pytest.mark.parametrize("max_vectorized_clients", ["auto", 1, 7])
@pytest.mark.parametrize("experiences", [1, 2])
def test_closed_form_sums_equal_pooled_solution(fit, make_stream, experiences, max_vectorized_clients):
    task, stream = LeastSquares("sums"), make_stream(partition="dirichlet", num_experiences=experiences)
    assert isinstance(task, HasLocalTrainer) and isinstance(task, HasAggregationHook)
    trainer = fit(task, stream, max_vectorized_clients=max_vectorized_clients)
    rows = np.concatenate([rows for current in stream.plan.train for rows in current.values()])
    np.testing.assert_allclose(task.weight.detach(), solution(stream, rows), atol=1e-9)
    local = trainer.strategy.federation.local_trainer
    assert type(local) is NormalEquations and local.num_vectorized_clients == (
        2 if max_vectorized_clients == "auto" else max_vectorized_clients
    )
    assert local.began == local.finished == sum(len(current) for current in stream.plan.train)


@pytest.mark.parametrize("clients", [1, 3])
def test_closed_form_solutions_are_averaged_by_samples(fit, make_stream, clients):
    task, stream = LeastSquares("weights"), make_stream(num_clients=clients, num_experiences=1, partition="iid")
    fit(task, stream)
    (current,) = stream.plan.train
    sizes = np.array([len(rows) for rows in current.values()])
    own = np.stack([solution(stream, rows) for rows in current.values()])
    np.testing.assert_allclose(task.weight.detach(), (sizes / sizes.sum()) @ own, atol=1e-9)
    pooled = solution(stream, np.concatenate(list(current.values())))
    assert np.allclose(task.weight.detach(), pooled, atol=1e-9) == (clients == 1)


class Anchored(Method):
    """A user-defined method with two penalties: on the distance of a weight to an anchor, and on large features.

    The anchor is the average of the weight that the client has stored and the received weight. The client stores its
    trained weight with random elements set to 0.
    """

    def prepare_client_state(self, client):
        anchor = client.method_state.get("anchor", client.received_state["model.1.weight"])
        rounds = client.method_state.get("rounds", torch.tensor(0))
        return {"anchor": 0.5 * (anchor + client.received_state["model.1.weight"]), "rounds": rounds}

    def penalty(self, client, step):
        distance = (step.params["model.1.weight"] - client.method_state["anchor"]).square().sum()
        pull = step.mean(step.embed_fn(step.x).square().sum(dim=1) * step.y)
        return 0.1 * client.method_state["rounds"] * distance + 0.2 * pull

    def update_client_state(self, client, trained_state, data):
        kept = (torch.rand(trained_state["model.1.weight"].shape, generator=client.generator) > 0.1).float()
        return {"anchor": trained_state["model.1.weight"].clone() * kept, "rounds": client.method_state["rounds"] + 1}


class Listening(Method):
    """A user-defined method that overrides a batch hook, so clients must train sequentially."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pass


@pytest.mark.seconds
def test_custom_method_vectorized_equals_sequential(fit, make_stream, make_task):
    states, memories, sizes = [], [], []
    for max_vectorized_clients in (1, "auto"):
        stream = make_stream(num_clients=5, partition="dirichlet", rounds_per_experience=2)
        task, method = make_task(), Anchored(clients=["0", "2", "3"])
        federation = fit(
            task, stream, [method], max_vectorized_clients=max_vectorized_clients, local_epochs=2
        ).strategy.federation
        states.append(task.state_dict())
        memories.append(
            {
                f"{c}.{n}": v.float()
                for c in "023"
                for n, v in federation.server.client_store.get_section(c, "Anchored").items()
            }
        )
        sizes.append(federation.local_trainer.num_vectorized_clients)
        assert not federation.server.client_store.get_section("1", "Anchored")
    assert sizes[0] == 1 and sizes[1] > 1
    for one, other in (states, memories):
        torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=1e-5)
    plain = make_task()
    fit(plain, make_stream(num_clients=5, partition="dirichlet", rounds_per_experience=2), local_epochs=2)
    assert (plain.state_dict()["model.1.weight"] - states[0]["model.1.weight"]).abs().max() > 1e-3


def test_custom_method_with_batch_hook_trains_sequentially(fit, make_stream, make_task):
    trainer = fit(make_task(), make_stream(), [Listening()], max_epochs=1)
    assert trainer.strategy.federation.local_trainer.num_vectorized_clients == 1
