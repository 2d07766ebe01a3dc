"""Tests of merging the metric states of several groups of clients into the state of one metric."""

import pytest
import torch
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
)
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.regression import (
    ConcordanceCorrCoef,
    ExplainedVariance,
    MeanSquaredError,
    NormalizedRootMeanSquaredError,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.wrappers import Running

from lightning_fcl.simulation.metric_states import (
    default_state,
    is_mergeable,
    merged,
    set_state,
    state_of,
)


def numbers(seed):
    return (torch.randn(9, generator=torch.Generator().manual_seed(seed)),)


def pairs(seed):
    (x,) = numbers(seed)
    return x, x + numbers(seed + 100)[0]


def classes(seed):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(9, 4, generator=draws), torch.randint(4, (9,), generator=draws)


def queries(seed):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(9, generator=draws), torch.arange(9) % 2, torch.full((9,), seed)


def halves(seed):
    return torch.rand(9, generator=torch.Generator().manual_seed(seed)), torch.arange(9) % 2


def grids(seed):
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(4, (9, 3), generator=draws), torch.randint(4, (9, 3), generator=draws)


METRICS = [
    *[(metric, numbers) for metric in (SumMetric, MeanMetric, MaxMetric, MinMetric, CatMetric)],
    *[(metric, pairs) for metric in (MeanSquaredError, R2Score, ExplainedVariance, SpearmanCorrCoef)],
    *[(metric, pairs) for metric in (PearsonCorrCoef, ConcordanceCorrCoef)],
    (lambda: PeakSignalNoiseRatio(3.3), pairs),
    (
        lambda: PearsonCorrCoef(num_outputs=2),
        lambda seed: (torch.stack(pairs(seed), 1), torch.stack(pairs(seed + 9), 1)),
    ),
    (lambda: MulticlassAccuracy(4), classes),
    (lambda: MulticlassAUROC(4), classes),
    (lambda: MulticlassAUROC(4, thresholds=5), classes),
    (lambda: MulticlassConfusionMatrix(4), classes),
    (lambda: MulticlassExactMatch(4, multidim_average="samplewise"), grids),
    (BinaryAUROC, halves),
    (RetrievalMAP, queries),
]


@pytest.mark.parametrize("place", range(len(METRICS)))
def test_merged_state_equals_state_of_one_metric(place):
    """Groups of one, two and three batches are merged into the state of an earlier round."""
    make, draw = METRICS[place]
    whole, metric = make(), make()
    assert is_mergeable(metric)
    whole.update(*draw(0))
    metric.update(*draw(0))
    states = [state_of(metric)]
    for batches in ([1], [2, 3], [4, 5, 6]):
        set_state(metric, default_state(metric))
        for seed in batches:
            metric.update(*draw(seed))
            whole.update(*draw(seed))
        states.append(state_of(metric))
    set_state(metric, merged(metric, states))
    assert metric.update_count == whole.update_count == 7
    torch.testing.assert_close(metric.compute(), whole.compute(), rtol=1e-5, atol=1e-5)
    if isinstance(whole, CatMetric | MaxMetric | MinMetric | MulticlassAccuracy):
        assert torch.equal(metric.compute(), whole.compute())


def test_merged_state_skips_groups_before_a_reset():
    metric, states = SumMetric(), []
    for number, is_reset in ((1.0, False), (2.0, True), (4.0, False)):
        set_state(metric, default_state(metric))
        metric.update(number)
        states.append(state_of(metric)._replace(is_reset=is_reset))
    set_state(metric, merged(metric, states))
    assert float(metric.compute()) == 6.0


def test_merged_state_without_updates_is_default():
    metric = CatMetric()
    assert merged(metric, [default_state(metric)] * 2) == ({"value": []}, 0, False)


class WithoutReduction(SumMetric):
    """A metric whose state has no reduction."""

    def __init__(self):
        super().__init__()
        self.add_state("sum_value", torch.tensor(0.0), dist_reduce_fx=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Running(SumMetric(), 2),
        WithoutReduction,
        lambda: NormalizedRootMeanSquaredError("std"),  # This metric fails on the states of three processes.
    ],
)
def test_is_mergeable_unsupported_metric_is_false(make):
    assert not is_mergeable(make())
