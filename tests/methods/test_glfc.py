"""GLFC: class-aware weights by hand, and the whole of it against a loop."""

import copy

import pytest
import torch

from lightning_fcl.callbacks import GLFC, Replay
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.glfc import class_aware_weights
from lightning_fcl.methods.step import Step
from lightning_fcl.models import MLP

pytestmark = pytest.mark.rounding


def weights_by_hand(z, y, old):
    labels = y.tolist()
    pace = [abs(float(torch.sigmoid(row[label].detach()) - 1)) for row, label in zip(z, labels, strict=True)]
    weights = []
    for own, label in zip(pace, labels, strict=True):
        group = [other for other, c in zip(pace, labels, strict=True) if (c in old) == (label in old)]
        weights.append(own * len(group) / sum(group))
    return torch.tensor(weights)


def loss_by_hand(z, y, old, seen, teacher, strength):
    """The paper's, sample by sample and class by class."""
    weights, total = weights_by_hand(z, y, old), 0.0
    strength = strength if old else 0.0
    for row, label, weight, said in zip(z, y.tolist(), weights, teacher, strict=True):
        for c in seen:
            p, known = torch.sigmoid(row[c]), torch.sigmoid(said[c])
            for share, t in (
                ((1 - strength) * weight, float(c == label)),
                (strength, known if c in old else float(c == label)),
            ):
                total = total - share * (t * p.log() + (1 - t) * (1 - p).log()) / len(seen) / len(y)
    return total


def penalty(method, z, y, teacher, new, old=(), weight=None):
    """The penalty, and its gradient."""
    client = Client(part=ClientRound("0", 0, num_classes=z.shape[1], new_classes=new, old_classes=old))
    client.memory = method.on_download(client)
    z = z.clone().requires_grad_()
    value = method.penalty(client, Step({}, {}, None, z, lambda state, x: teacher, weight=weight, y=y))
    return value.detach(), torch.autograd.grad(value, z)[0]


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("old", [(), (0, 3)])
def test_the_loss_and_its_gradient_are_the_papers(strength, old):
    for seed in range(3):
        torch.manual_seed(seed)
        z, teacher, y = 2 * torch.randn(9, 6), torch.randn(9, 6), torch.arange(9) % 5
        new = tuple(c for c in range(5) if c not in old)  # the sixth class is still to come
        value, gradient = penalty(GLFC(strength), z, y, teacher, new, old)
        leaf = z.clone().requires_grad_()
        wanted = loss_by_hand(leaf, y, old, range(5), teacher, strength)
        torch.testing.assert_close(value, wanted.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(wanted, leaf)[0])
        assert (gradient[:, 5] == 0).all()
        assert GLFC(strength).task_weight(Client()) == 0


def test_where_all_learn_at_one_pace_it_is_the_plain_binary_cross_entropy():
    torch.manual_seed(0)
    z, y = torch.randn(8, 4), torch.arange(8) % 4
    z[torch.arange(8), y] = 0.3
    for new in ((0, 1, 2, 3), ()):  # a stream that is not of classes tells none
        value, _ = penalty(GLFC(0.7), z, y, torch.randn(8, 4), new)
        plain = torch.nn.functional.binary_cross_entropy_with_logits(z, torch.eye(4)[y])
        torch.testing.assert_close(value, plain)


def test_weights_of_old_and_of_new_classes_are_one_on_average_and_slow_ones_weigh_more():
    torch.manual_seed(0)
    z, y, old = 3 * torch.randn(20, 4), torch.arange(20) % 4, torch.tensor([True, True, False, False])
    weights = class_aware_weights(z, y, old)
    torch.testing.assert_close(weights, weights_by_hand(z, y, (0, 1)))
    for group in (old[y], ~old[y]):
        assert float(weights[group].mean()) == pytest.approx(1, abs=1e-5)
    own = z.gather(1, y[:, None])[:, 0]
    assert weights[old[y]][own[old[y]].argmin()] == weights[old[y]].max() > 1
    assert torch.isfinite(class_aware_weights(z + 1000, y, old)).all()
    assert class_aware_weights(z, y, ~old.new_zeros(4)).mean() == pytest.approx(1, abs=1e-5)  # no class is new


def test_samples_of_no_share_count_for_nothing():
    torch.manual_seed(0)
    z, teacher, y = torch.randn(6, 4), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    share = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0, 0.0])
    padded, _ = penalty(GLFC(), z, y, teacher, (2, 3), (0, 1), share)
    alone, _ = penalty(GLFC(), z[:4], y[:4], teacher[:4], (2, 3), (0, 1))
    torch.testing.assert_close(padded, alone)


@pytest.mark.seconds
@pytest.mark.parametrize("size", [1, "auto"])
def test_in_a_federation_it_is_the_papers_algorithm(fit, make_stream, make_task, assert_same, size):
    task = make_task(model=MLP([6, 16, 4]))
    stream = make_stream(rounds_per_experience=2, shuffle=False)
    stream.setup("fit")
    w, teacher = copy.deepcopy(task), None
    for number, current in enumerate(stream.plan.train):
        new, old = stream.plan.classes(number)
        teacher = copy.deepcopy(w) if number == 2 else teacher
        uploads = []
        for rows in current.values():
            model, (x, y) = copy.deepcopy(w), stream.take(rows)
            optimizer = model.configure_optimizers()
            for indices in torch.arange(len(y)).split(8):
                z = model(x[indices])
                said = z.detach() if teacher is None else teacher(x[indices]).detach()
                optimizer.zero_grad()
                loss_by_hand(z, y[indices], old, sorted(new + old), said, 0.6).backward()
                optimizer.step()
            uploads.append((len(y), model.state_dict()))
        total = sum(n for n, _ in uploads)
        w.load_state_dict({name: sum(n * state[name] for n, state in uploads) / total for name in w.state_dict()})
    fit(task, make_stream(rounds_per_experience=2, shuffle=False), [GLFC(0.6)], cohort_size=size, seed=0)
    assert_same(task, w, 2e-5)


def test_in_the_first_experience_nothing_is_distilled(fit, make_stream, make_task, assert_same):
    for rounds, same in ((2, True), (4, False)):
        tasks = [make_task() for _ in range(2)]
        for task, strength in zip(tasks, (0.0, 0.9), strict=True):
            trainer = fit(task, make_stream(rounds_per_experience=2), [GLFC(strength)], cohort_size=1,
                          max_epochs=rounds, seed=0)  # fmt: skip
            names = trainer.strategy.server.store.memory("0", "GLFC")
            assert any(name.startswith("teacher.") for name in names) == (strength > 0)
        if same:
            assert_same(*tasks, 0)
        else:
            with pytest.raises(AssertionError):
                assert_same(*tasks, 1e-3)


@pytest.mark.seconds
@pytest.mark.parametrize("size", [1, "auto"])
def test_resumed_is_uninterrupted(assert_resumes, make_task, size):
    assert_resumes(make_task, lambda: GLFC(0.5), cohort_size=size)


def test_beside_exemplars_old_classes_are_weighed_among_themselves(fit, make_stream, make_task, assert_same):
    tasks = [make_task() for _ in range(2)]
    for task, methods in zip(tasks, ([GLFC(), Replay(20)], [GLFC()]), strict=True):
        fit(task, make_stream(), methods, cohort_size=1, seed=0)
        assert all(torch.isfinite(value).all() for value in task.state_dict().values())
    with pytest.raises(AssertionError):
        assert_same(*tasks, 1e-3)


def test_the_teacher_is_what_comes_first_in_an_experience():
    method, memory = GLFC(), {}
    for number, (experience, taught) in enumerate([(0, 0), (0, 0), (2, 2), (2, 2), (3, 4)]):
        part = ClientRound("0", number, experience, num_classes=4, new_classes=(3,), old_classes=(0, 1))
        memory = method.on_download(Client(memory, {"w": torch.tensor(float(number))}, part))
        assert float(memory["teacher.w"]) == taught
        assert memory["old"].tolist() == [True, True, False, False]
        assert memory["seen"].tolist() == [True, True, False, True]
