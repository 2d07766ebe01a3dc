"""Tests of custom reductions: in a module, a rule and a recipe, with vectorized clients, and after a checkpoint."""

import lightning.pytorch as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl import FederatedStrategy
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import GatheringAccumulator
from lightning_fcl.federation.aggregation import Aggregator, get_reductions
from lightning_fcl.federation.compression import TopK
from lightning_fcl.federation.reductions import Mean, Reduction, Sum
from lightning_fcl.federation.robust import Krum, TrimmedMean


class PowerMean(Reduction):
    """The power mean: a root of the weighted mean of powers. The accumulator does not store the uploads."""

    name = "power_mean"
    made = 0

    def __init__(self, exponent: float = 3.0) -> None:
        self.exponent = exponent

    def make_accumulator(self):
        type(self).made += 1
        return Powers(self.exponent)


class Powers:
    """An accumulator that sums powers of the uploads."""

    def __init__(self, exponent):
        self.exponent, self.sums, self.weight = exponent, {}, 0.0

    def update(self, values, weights):
        for name, value in values.items():
            wide = value.double()
            powers = torch.tensordot(torch.tensor(weights).double(), wide.sign() * wide.abs() ** self.exponent, dims=1)
            self.sums[name] = self.sums.get(name, 0) + powers
        self.weight += sum(weights)

    def compute(self, server):
        means = {name: total / self.weight for name, total in self.sums.items()}
        return {n: (m.sign() * m.abs() ** (1 / self.exponent)).to(server[n].dtype) for n, m in means.items()}


class Maximum(Reduction):
    """The element-wise maximum of the uploads."""

    name = "maximum"

    def make_accumulator(self):
        return GatheringAccumulator(
            lambda rows, server: {name: torch.stack(row).amax(dim=0) for name, row in rows.items()}
        )


class Extent(L.LightningModule):
    """A module that stores the largest value of each feature, the seen classes, and the number of samples."""

    def __init__(self):
        super().__init__()
        self.reductions = {"largest": Maximum(), "seen": Maximum(), "samples": Sum()}
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("largest", torch.full((6,), -torch.inf))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.long))
        self.register_buffer("samples", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.largest = torch.maximum(self.largest, x.amax(dim=0))
        self.seen = torch.maximum(self.seen, torch.bincount(y, minlength=4).clamp(max=1))
        self.samples += len(y)
        return self.weight.sum() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_custom_reduction_declared_by_module(fit, make_stream):
    task, stream = Extent(), make_stream()
    # Start with finite numbers, because uploads with non-finite numbers are dropped.
    task.largest.fill_(-1e9)
    fit(task, stream, max_epochs=1)
    rows = torch.cat([torch.from_numpy(rows) for rows in stream.plan.train[0].values()])
    x, y = stream.get_samples(rows.numpy())
    assert torch.equal(task.largest, x.amax(dim=0)) and int(task.samples) == len(rows)
    assert task.seen.nonzero().flatten().tolist() == sorted(set(y.tolist()))


class Uploads(Callback):
    """Records for each round: each client's number of samples and upload, and the server's state after the round."""

    def __init__(self):
        self.rounds, self.now = [], []

    def on_client_end(self, trainer, pl_module, client_round):
        self.now.append((client_round.num_samples, snapshot(pl_module)))

    def on_round_end(self, trainer, pl_module):
        self.rounds.append((self.now, snapshot(pl_module)))
        self.now = []


RULES = {"model.1.*": PowerMean(3.0), "model.3.weight": PowerMean(3.0), "model.3.bias": Maximum()}


@pytest.mark.parametrize("max_vectorized_clients", [1, 2, 3])
def test_custom_reduction_in_rules_equals_result_by_hand(fit, make_stream, make_task, max_vectorized_clients):
    watch, before = Uploads(), PowerMean.made
    trainer = fit(
        make_task(), make_stream(), [watch], reductions=RULES, max_vectorized_clients=max_vectorized_clients, seed=0
    )
    assert [len(clients) for clients, _ in watch.rounds] == [3, 3]
    for clients, server in watch.rounds:
        total = sum(n for n, _ in clients)
        for name, value in server.items():
            if name == "model.3.bias":
                expected = torch.stack([state[name] for _, state in clients]).amax(dim=0)
            else:
                mean = sum(n * state[name].double() ** 3 for n, state in clients) / total
                expected = (mean.sign() * mean.abs() ** (1 / 3)).float()
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    # Each round makes one accumulator for all entries with equal reductions, and the start of the fit makes another.
    assert PowerMean.made - before == 1 + len(watch.rounds)
    record = trainer.strategy.server.record
    assert set(record.upload_bytes.values()) == {sum(value.nbytes for value in watch.rounds[0][1].values())}


@pytest.mark.seconds
def test_resume_with_custom_reductions_equals_uninterrupted_fit(fit, make_stream, make_task, assert_resumes, tmp_path):
    assert_resumes(make_task, Callback, reductions=RULES, max_vectorized_clients=1)
    stream, path = make_stream(num_clients=4, rounds_per_experience=2), tmp_path / "epoch=1.ckpt"
    for other in (PowerMean(2.0), Maximum(), "mean"):
        rules = {**RULES, "model.1.*": other}
        with raises(InvalidValueError, "reductions", code="other-recipe"):
            fit(
                make_task(),
                stream,
                ckpt_path=path,
                reductions=rules,
                participation=0.7,
                seed=5,
                max_vectorized_clients=1,
            )


def test_recipe_creates_reductions_and_compression():
    parser = ArgumentParser()
    parser.add_class_arguments(FederatedStrategy, "strategy")
    krum = {"class_path": "lightning_fcl.federation.robust.Krum", "init_args": {"num_malicious_clients": 2}}
    code = {"class_path": "lightning_fcl.federation.compression.TopK", "init_args": {"fraction": 0.2}}
    given = {"reductions": {"model.0.*": "local", "model.1.*": krum}, "compression": code}
    strategy = parser.instantiate_classes(parser.parse_object({"strategy": given})).strategy
    assert strategy.settings.rules == {"model.0.*": "local", "model.1.*": Krum(2)}
    assert strategy.server.pipeline.codec.fingerprint() == TopK(0.2).fingerprint()


def test_reductions_equal_by_class_and_arguments():
    assert Krum(1) == Krum(1) != Krum(2) and len({Krum(1), Krum(1), Krum(2), TrimmedMean(0.1), Mean(), Mean()}) == 4
    assert PowerMean(2.0).fingerprint() == {"name": "power_mean", "exponent": 2.0} and repr(PowerMean()) == "power_mean"


def test_krum_equal_reductions_select_one_client_together():
    uploads = {"a": torch.tensor([[0.0], [0.1], [0.2], [9.0]]), "b": torch.tensor([[7.0], [0.1], [0.2], [0.3]])}
    server = {name: torch.zeros(1) for name in "ab"}
    chosen = {}
    for label, (a, b) in {"together": (Krum(1), Krum(1)), "apart": (Krum(1), Krum(0))}.items():
        aggregator = Aggregator({"a": a, "b": b})
        aggregator.accumulate(uploads, [1.0] * 4, range(4))
        result = aggregator.compute(server)
        chosen[label] = [int((uploads[name] == result[name]).nonzero()[0, 0]) for name in "ab"]
    assert chosen["together"][0] == chosen["together"][1] and chosen["apart"][0] != chosen["apart"][1]


def test_uploaded_reduction_without_accumulator_raises():
    class Lazy(Reduction):
        name = "lazy"

    with pytest.raises(NotImplementedError, match="Expected `Lazy` to define `make_accumulator`"):
        Aggregator({"w": Lazy()})


def test_get_reductions_accepts_names_and_objects():
    module = nn.Linear(2, 2)
    module.reductions = {"*": Maximum(), "bias": "sum"}
    assert get_reductions(module) == {"weight": Maximum(), "bias": Sum()}
    assert get_reductions(module, {"bias": PowerMean(2.0)}) == {"weight": Maximum(), "bias": PowerMean(2.0)}
