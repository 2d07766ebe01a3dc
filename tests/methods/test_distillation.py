"""Tests of LwF, FLwF and FLwF-2T: identities of the losses, and training compared with hand-written loops."""

import copy

import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn

from lightning_fcl.callbacks import FedProx, FLwF, FLwF2T, LwF
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.experience import noted, receive
from lightning_fcl.methods.functional import make_teacher_fn

from .test_fedprox import Detour

pytestmark = pytest.mark.rounding


def kd(student, teacher, temperature=2.0):
    """Return the mean cross-entropy of the softened student outputs with the softened teacher outputs as targets."""
    target, log = F.softmax(teacher / temperature, 1), F.log_softmax(student / temperature, 1)
    entropy = torch.distributions.Categorical(probs=target).entropy().mean()
    return F.kl_div(log, target, reduction="batchmean") + entropy


def frozen(task):
    return copy.deepcopy(task).eval().requires_grad_(False)


@pytest.fixture
def step(make_task, samples):
    """Return a `Step` of a student model. The received server state is the state of another model."""
    student, server, x = make_task(), make_task(seed=1), samples()[0]
    return Step(dict(student.named_parameters()), server.state_dict(), x, student(x), make_teacher_fn(student))


@pytest.fixture
def own(make_task):
    """Return the method state of a client that has trained before."""
    return with_prefix(make_task(seed=2).state_dict(), "own")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 20.0])
def test_distillation_loss_is_divergence_plus_entropy(temperature):
    student, teacher = torch.randn(2, 16, 5, dtype=torch.float64)
    loss = distillation_loss(student, teacher, temperature)
    assert loss.shape == (16,)
    torch.testing.assert_close(loss.mean(), kd(student, teacher, temperature), rtol=1e-12, atol=0)


def test_flwf2t_penalty_sums_both_teachers(step, own):
    expected = [
        kd(step.output, step.teacher_forward(state, step.x))
        for state in (strip_prefix(own, "own"), step.received_state)
    ]
    torch.testing.assert_close(FLwF2T(0.1, 0.7).penalty(Client(own), step), 0.7 * expected[0] + 0.2 * expected[1])


def test_flwf2t_without_server_weight_equals_flwf(step, own):
    flwf, two = FLwF(0.3), FLwF2T(0.3, 0.7)
    assert flwf.task_weight(Client()) == two.task_weight(Client()) == 0.3
    assert torch.equal(flwf.penalty(Client(own), step), two.penalty(Client(own), step))
    torch.testing.assert_close(
        two.penalty(Client(own), step), 0.7 * kd(step.output, step.teacher_forward(strip_prefix(own, "own"), step.x))
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_flwf_each_alpha_sets_beta_to_rest(alpha):
    assert FLwF(alpha).beta == 1 - alpha


def test_flwf2t_student_equal_to_server_has_zero_gradient(make_task, samples):
    student, (x, _) = make_task(), samples()
    step = Step({}, copy.deepcopy(student.state_dict()), x, student(x), make_teacher_fn(student))
    FLwF2T(alpha=0.001, beta=0.0).penalty(Client(), step).backward()
    assert max(p.grad.abs().max() for p in student.parameters()) < 1e-7


def test_flwf2t_in_first_round_distills_from_server_only(step):
    method = FLwF2T(0.1, 0.7)
    memory = method.prepare_client_state(Client({}, step.received_state, ClientRound("a", 3)))
    torch.testing.assert_close(
        method.penalty(Client(memory), step), 0.9 * kd(step.output, step.teacher_forward(step.received_state, step.x))
    )


def test_flwf2t_after_round_stores_trained_model_as_teacher(make_task, own):
    trained, client_round = make_task(seed=5).state_dict(), ClientRound("a", 0)
    memory = FLwF2T().update_client_state(Client(own, client_round=client_round), trained, None)
    kept = {name: value.clone() for name, value in trained.items()}
    for value in trained.values():
        value.zero_()
    assert all(torch.equal(strip_prefix(memory, "own")[name], kept[name]) for name in kept)
    assert FLwF2T().prepare_client_state(Client(memory, trained, client_round)) is memory


@pytest.mark.parametrize(("teacher", "of"), [("client", 2), ("server", 0)])
def test_lwf_old_classes_follow_experience_index(make_task, teacher, of):
    method, states = LwF(teacher=teacher), [make_task(seed=s).state_dict() for s in range(4)]
    before = {f"LwF.before.1.{name}": value for name, value in states[0].items()} if teacher == "server" else {}

    def a_round(memory, received, own, number, experience, label):
        part = ClientRound("a", number, experience, torch.tensor([label]), num_classes=4)
        client = Client(memory, {**received, **(before if experience else {})}, part, section_name="LwF")
        client.method_state = receive(method, client)
        return client.method_state, noted(
            method, client, "update_client_state", method.update_client_state(client, own, None)
        )

    first, memory = a_round({}, states[0], states[1], 0, 0, label=2)
    assert first["old"].tolist() == [False] * 4
    same, memory = a_round(memory, states[0], states[2], 1, 0, label=0)
    assert same["old"].tolist() == [False] * 4
    for number in (2, 3):
        later, memory = a_round(memory, states[3], states[3], number, 1, label=1)
        assert later["old"].tolist() == [True, False, True, False]
        assert all(torch.equal(strip_prefix(later, "teacher")[n], states[of][n]) for n in states[of])
        # A client stores the teacher only if `teacher` is "client".
        assert bool(strip_prefix(memory, "teacher")) == (teacher == "client")
        assert bool(strip_prefix(later, "latest")) == (teacher == "client")


def normalised(make_task):
    """Return a task with batch normalization, whose outputs differ between training and evaluation mode."""
    torch.manual_seed(4)
    return make_task(model=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)))


@pytest.mark.parametrize("kind", ["plain", "batch norm"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_flwf2t_in_plain_trainer_equals_hand_written_loop(
    make_task, samples, train, by_hand, assert_same, kind, accumulate
):
    task = make_task() if kind == "plain" else normalised(make_task)
    copied, data, teachers = copy.deepcopy(task), samples(), []
    train(task, [FLwF2T(0.4, 0.5)], data, epochs=3, accumulate_grad_batches=accumulate)

    def loss(output, x, y):
        return 0.4 * F.cross_entropy(output, y) + 0.6 * kd(output, teachers[-1](x))

    # In a plain Trainer, the client's previous model is the model at the start of the epoch.
    by_hand(copied, data, loss, 3, lambda epoch: teachers.append(frozen(copied)), accumulate)
    assert_same(task, copied)


def test_fedprox_and_flwf2t_in_either_order_equal_hand_written_loop(make_task, samples, train, by_hand, assert_same):
    first, second, copied, data, teachers = make_task(), make_task(), make_task(), samples(), []
    train(first, [FedProx(0.5), FLwF2T(0.4, 0.5)], data)
    train(second, [FLwF2T(0.4, 0.5), FedProx(0.5)], data)

    def loss(output, x, y):
        pairs = zip(copied.parameters(), teachers[-1].parameters(), strict=True)
        distance = sum(((p - q) ** 2).sum() for p, q in pairs)
        return 0.4 * F.cross_entropy(output, y) + 0.6 * kd(output, teachers[-1](x)) + 0.25 * distance

    by_hand(copied, data, loss, begin=lambda epoch: teachers.append(frozen(copied)))
    assert_same(first, copied)
    assert_same(second, first)


def test_lwf_training_step_without_self_call_raises(samples, train):
    with raises(InvalidStateError, "output"):
        train(Detour(nn.Linear(6, 4), 4), [LwF()], samples())


@pytest.mark.parametrize("beta", [-0.1, 0.6])
def test_flwf2t_invalid_beta_raises(beta):
    f"Expected `alpha + beta` to be at most 1 and `beta` at least 0 but got alpha=0.5, beta={beta}. " + (
        "Lower `beta` to at most 1 - alpha, so that" if beta > 0 else "Use a `beta` between 0 and 1 - alpha."
    )
    with raises(InvalidValueError, "beta"):
        FLwF2T(0.5, beta)


def test_flwf2t_live_teacher_adds_no_term_and_no_state():
    method = FLwF2T(0.2, 0.5, teacher="live")
    student, server = torch.randn(4, 3), torch.randn(4, 3)
    step = Step({}, {"server": server}, None, student, lambda state, x: state["server"])
    memory = method.prepare_client_state(Client({}, {"server": server}, ClientRound("a", 0)))
    assert (
        memory
        == method.update_client_state(
            Client({}, client_round=ClientRound("a", 0), generator=torch.Generator()), {"w": student}, None
        )
        == {}
    )
    expected = 0.3 * distillation_loss(student, server).mean()
    assert torch.allclose(method.penalty(Client(memory), step), expected)


def test_flwf2t_reduction_mean_divides_by_number_of_classes():
    student, server = torch.randn(4, 3), torch.randn(4, 3)
    step = Step({}, {"server": server}, None, student, lambda state, x: state["server"])
    batch, elements = (
        FLwF2T(0.2, 0.5, reduction=m, teacher="live").penalty(Client(), step) for m in ("batchmean", "mean")
    )
    assert torch.allclose(batch, 3 * elements)
