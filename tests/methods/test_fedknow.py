"""Tests of FedKNOW: the weights that are kept for each task, their predictions, and the projection of gradients."""

import copy

import torch
import torch.nn.functional as F

from lightning_fcl.callbacks import FedKNOW
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.methods.context import Client, strip_prefix
from lightning_fcl.methods.fedknow import largest, load_task_network

from .test_fedvit import OWN, make_stream, make_task


def test_largest_selects_largest_free_weights():
    generator = torch.Generator().manual_seed(0)
    weight, free = torch.randn(20, 10, generator=generator), torch.rand(20, 10, generator=generator) < 0.6
    chosen = largest(weight, free, 0.1)
    assert chosen.sum() == 20 and not (chosen & ~free).any()
    assert weight.abs()[chosen].min() >= weight.abs()[free & ~chosen].max()
    # The share of 0.9 is larger than the share of free weights, so all free weights are selected.
    assert largest(weight, free, 0.9).sum() == free.sum()


def extracted(method, task, tasks=3):
    memories, memory = [], {}
    for number in range(tasks):
        torch.manual_seed(number)
        own = {name: torch.randn_like(value) for name, value in task.state_dict().items()}
        data = [torch.randn(12, 6), torch.randint(0, 2, (12,)) + 2 * number]
        client_round = ClientRound("a", number, number, num_classes=8, task_classes=(2 * number, 2 * number + 1))
        memory = method.extract_knowledge(Client(client_round=client_round, module=task), memory, own, data)
        memories.append((own, memory))
    return memories


def test_fedknow_task_weights_are_disjoint_and_unchanged():
    task = make_task()
    memories = extracted(FedKNOW(rho=0.2, tune_epochs=0), task)
    for number, (own, memory) in enumerate(memories):
        owner, kept = memory["owner.model.body.0.weight"], memory["kept.model.body.0.weight"]
        # Each task owns 6 weights: 20 % of 5 x 6.
        assert [(owner == n + 1).sum().item() for n in range(number + 1)] == [6] * (number + 1)
        assert torch.equal(kept[owner == number + 1], own["model.body.0.weight"][owner == number + 1])
        assert (kept[owner == 0] == 0).all()
        if number:
            before = memories[number - 1][1]
            earlier = before["owner.model.body.0.weight"] > 0
            assert torch.equal(kept[earlier], before["kept.model.body.0.weight"][earlier])
            assert torch.equal(owner[earlier], before["owner.model.body.0.weight"][earlier])
    network = load_task_network(memories[2][1], 1)
    owner = memories[2][1]["owner.model.body.0.weight"]
    assert ((network["model.body.0.weight"] != 0) == ((owner == 1) | (owner == 2))).all()
    assert torch.equal(network["model.head.weight"], memories[1][0]["model.head.weight"])
    assert torch.equal(network["model.body.0.bias"], memories[1][0]["model.body.0.bias"])


def test_fedknow_tuning_changes_task_weights_only_and_lowers_loss():
    task = make_task()
    plain = extracted(FedKNOW(rho=0.2, tune_epochs=0), task)
    tuned = extracted(FedKNOW(rho=0.2, tune_epochs=40, tune_lr=0.02), task)
    for number, ((_, left), (_, right)) in enumerate(zip(plain, tuned, strict=True)):
        owner = right["owner.model.body.0.weight"]
        assert torch.equal(owner, left["owner.model.body.0.weight"])
        name = "kept.model.body.0.weight"
        if number == 0:
            assert ((left[name] != right[name]) == (owner == 1)).all()
        else:
            # The tuning of a new task does not change the weights of earlier tasks.
            earlier = (owner > 0) & (owner <= number)
            assert torch.equal(right[name][earlier], tuned[number - 1][1][name][earlier])
    losses = [0.0, 0.0]
    for number in range(3):
        torch.manual_seed(number)
        _ = [torch.randn_like(value) for value in task.state_dict().values()]
        x, y = torch.randn(12, 6), torch.randint(0, 2, (12,))
        for i, memories in enumerate((plain, tuned)):
            other = copy.deepcopy(task)
            other.load_state_dict(load_task_network(memories[number][1], number))
            losses[i] += F.cross_entropy(other(x)[:, 2 * number : 2 * number + 2], y).item()
    # Measured: the sum of the losses is 3.39 without tuning and 3.17 with tuning.
    assert losses[1] < losses[0] - 0.1, losses


def test_fedknow_past_gradient_equals_distillation_gradient(fit):
    seen = []

    class Look(FedKNOW):
        def past_gradient(self, client, task, gradient_of):
            gradient = super().past_gradient(client, task, gradient_of)
            state = {name: value.clone() for name, value in client.module.state_dict().items()}
            seen.append(
                (
                    state,
                    client.batch[0].clone(),
                    load_task_network(client.method_state, task),
                    gradient,
                    client.received_state,
                )
            )
            return gradient

    task, stream = make_task(), make_stream(num_rounds=2)
    fit(task, stream, [Look(rho=0.3, temperature=3.0)], reductions=OWN, max_epochs=3)
    assert len(seen) == 2 * 4
    for client, (state, x, network, gradient, _) in zip([c for c in "01" for _ in range(4)], seen, strict=True):
        student, teacher = make_task(), make_task()
        student.load_state_dict(state)
        teacher.load_state_dict(network)
        block = list(stream.plan.classes_of_task(client, 0))
        target = F.softmax(teacher(x)[:, block] / 3, dim=1).detach()
        loss = -(target * F.log_softmax(student(x)[:, block] / 3, dim=1)).sum(dim=1).mean()
        by_hand = torch.autograd.grad(loss, list(student.model.body.parameters()))
        torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in by_hand]))


def test_fedknow_only_trained_clients_store_weights(fit):
    stream = make_stream(num_clients=3, batch_size=16)
    trainer = fit(make_task(), stream, [FedKNOW(rho=0.3)], participation=1, reductions=OWN, max_epochs=2)
    drawn_in = trainer.strategy.federation.participation.expected_clients
    drawn = {client for round_idx in range(2) for client in drawn_in(stream.plan, round_idx)}
    assert {client for client in stream.plan.clients if trainer.strategy.server.client_store[client]} == drawn
    for client in drawn:
        memory = trainer.strategy.server.client_store.get_section(client, "FedKNOW")
        owner = strip_prefix(memory, "owner")["model.body.0.weight"]
        assert (owner == 1).sum() == 9 and memory["block0"].tolist() == list(stream.plan.classes_of_task(client, 0))
        assert not any(name.startswith("body.") for name in memory)
