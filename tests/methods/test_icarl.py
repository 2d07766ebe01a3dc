"""Tests of iCaRL: herding, exemplars, distillation, and prediction by the nearest mean of exemplars."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept import memory_of
from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks import ICaRL, LwF, Replay
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.prototypes import herding_selection
from lightning_fcl.models import MLP


def unit(v):
    return v / np.linalg.norm(v)


@pytest.mark.parametrize("seed", range(5))
def test_herding_selection_is_greedy(seed):
    features = F.normalize(torch.randn(9, 3, generator=torch.Generator().manual_seed(seed)).double())
    rows, chosen = features.numpy(), []
    target = unit(rows.mean(axis=0))
    for _ in range(6):
        rest = [i for i in range(9) if i not in chosen]
        chosen.append(min(rest, key=lambda i: np.linalg.norm(unit(rows[[*chosen, i]].mean(axis=0)) - target)))
    assert herding_selection(features, 6).tolist() == chosen
    assert sorted(herding_selection(features, 20).tolist()) == list(range(9))
    assert herding_selection(features[:0], 3).tolist() == herding_selection(features, 0).tolist() == []


def test_icarl_new_classes_truncate_exemplars_of_old_classes(make_task, samples, train):
    method, task = ICaRL(9), make_task()
    train(task, [method], samples([0, 1]), epochs=1)
    first = memory_of(method)
    assert torch.bincount(first["y"]).tolist() == [4, 4]
    x, y = samples([0, 1])
    features = F.normalize(embeddings(task, task.state_dict(), x))
    for label in (0, 1):
        own = (y == label).nonzero()[:, 0]
        assert torch.equal(first["x"][first["y"] == label], x[own[herding_selection(features[own], 4)]])
    train(task, [method], samples([2, 3], seed=1), epochs=1)
    assert torch.bincount(memory_of(method)["y"]).tolist() == [2, 2, 2, 2]
    for label in (0, 1):
        kept = memory_of(method)["x"][memory_of(method)["y"] == label]
        assert torch.equal(kept, first["x"][first["y"] == label][:2])


@pytest.mark.seconds
def test_icarl_first_experience_has_no_distillation(fit, make_stream, make_task, assert_same):
    for experiences in (1, 2):
        tasks = [make_task() for _ in range(3)]
        for task, methods in zip(tasks, ([ICaRL(9, strength=5.0)], [ICaRL(9, strength=0.0)], []), strict=True):
            fit(task, make_stream(num_experiences=2), methods, max_epochs=experiences, max_vectorized_clients=1)
        if experiences == 1:
            assert_same(tasks[0], tasks[2], 0)
            assert_same(tasks[1], tasks[2], 0)
        else:
            for pair in ((0, 1), (1, 2)):
                with pytest.raises(AssertionError):
                    assert_same(tasks[pair[0]], tasks[pair[1]])


def test_icarl_training_equals_lwf_with_replay(make_task, samples, train, assert_same):
    class Given(Replay):
        def update_client_state(self, client, trained_state, data):
            return {name: exemplars[name] for name in ("x", "y")}

        @property
        def section_name(self):
            # The random seed depends on the section name, so both methods draw the same numbers.
            return "ICaRL"

    tasks, method = [make_task(), make_task()], ICaRL(8, 2.0)
    train(tasks[0], [method], samples([0, 1]), epochs=1)
    exemplars = memory_of(method)
    train(tasks[0], [method], samples([2, 3], seed=1), epochs=1)
    others = [LwF(2.0), Given(8, "reservoir", "round")]
    train(tasks[1], others, samples([0, 1]), epochs=1)
    train(tasks[1], others, samples([2, 3], seed=1), epochs=1)
    assert_same(*tasks, 0)


class Trained(Callback):
    """A callback that records each client's model state after its latest training, and the number of the round."""

    def __init__(self):
        self.states, self.rounds = {}, {}

    def on_client_end(self, trainer, pl_module, client_round):
        self.states[client_round.client_id] = copy.deepcopy(pl_module.state_dict())
        self.rounds[client_round.client_id] = client_round.round_idx


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
def test_icarl_predicts_class_of_nearest_exemplar_mean(fit, make_stream, make_task, max_vectorized_clients):
    stream, task, trained = make_stream(partition="dirichlet"), make_task(model=MLP([6, 16, 4])), Trained()
    trainer = fit(task, stream, [ICaRL(12), trained], max_vectorized_clients=max_vectorized_clients)
    features, labels = [], []
    for client, state in trained.states.items():
        memory = trainer.strategy.server.client_store.get_section(client, "ICaRL")
        features.append(F.normalize(embeddings(task, state, memory["x"])))
        labels.append(memory["y"])
    features, labels = torch.cat(features), torch.cat(labels)
    sums = trainer.strategy.server.get_section("ICaRL")["sums"]
    assert torch.equal(sums[:, 0], torch.bincount(labels, minlength=4).float())
    means = [unit(features[labels == label].mean(dim=0).numpy()) for label in range(4)]
    x, y = stream.get_samples(stream.plan.test)
    right = 0
    for sample, label in zip(task.embed(x).detach().numpy(), y.tolist(), strict=True):
        right += int(np.argmin([np.linalg.norm(unit(sample) - mean) for mean in means])) == label
    (measured,) = trainer.test(task, datamodule=stream, verbose=False)
    assert measured["test/accuracy"] == pytest.approx(right / len(y))
