"""Tests of DyTox's network: one pass of the encoder, independent task tokens, and the order of logits by class."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from raising import raises

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import DyTox
from lightning_fcl.models.lifelong_vit import TaskAttention

TINY = {"image_size": 8, "patch_size": 4, "width": 12, "depth": 2, "num_heads": 2}


def tiny(tasks=3, num_classes=6, **options):
    torch.manual_seed(0)
    return shaken(DyTox(tasks, num_classes, **{**TINY, **options}))


def shaken(model):
    """Return a model with random weights instead of special initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def test_dytox_has_the_documented_number_of_parameters(parameters_of):
    model = DyTox()
    block = (192 * 576 + 576) + (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192) + 4 * 192
    parts = {
        model.body: (48 * 192 + 192) + 64 * 192 + 5 * block,
        model.decoder: block,
        model.heads[0]: 2 * 192 + 192 * 10 + 10,
        model.divergence[0]: 2 * 192 + 192 * 11 + 11,
    }
    for part, number in parts.items():
        assert parameters_of(part) == number and f"{number:,}" in DyTox.__doc__
    assert [token.shape for token in model.tokens] == [(192,)] * 10
    assert {name.split(".")[0] for name in model.state_dict()} == {
        *("body", "decoder", "tokens", "heads", "divergence", "position", "learnt")
    }


def test_dytox_forward_runs_body_and_decoder_once():
    passes = {"body": 0, "decoder": 0}
    model = tiny(tasks=6)
    for part in passes:

        def count(*_, part=part):
            passes[part] += 1

        getattr(model, part).register_forward_hook(count)
    model(torch.randn(2, 3, 8, 8))
    assert passes == {"body": 1, "decoder": 1}


def by_hand(block, token, patches):
    """Return the output of an attention block for one task token and image patches, computed head by head."""
    z = torch.cat([token.expand(len(patches), 1, -1), patches], dim=1)
    normed = F.layer_norm(z, z.shape[2:], block.norm1.weight, block.norm1.bias)
    width = z.shape[2] // block.num_heads
    attended = []
    for head in range(block.num_heads):
        part = slice(head * width, (head + 1) * width)
        query = block.query(normed[:, :1])[..., part]
        key, value = block.key(normed)[..., part], block.value(normed)[..., part]
        attended.append((query @ key.transpose(1, 2) / width**0.5).softmax(dim=2) @ value)
    token = token + block.proj(torch.cat(attended, dim=2))
    normed = F.layer_norm(token, token.shape[2:], block.norm2.weight, block.norm2.bias)
    return (token + block.mlp(normed))[:, 0]


def test_task_attention_of_all_tokens_equals_one_pass_per_token():
    torch.manual_seed(0)
    block = shaken(TaskAttention(12, num_heads=3)).double()
    tokens, patches = torch.randn(4, 12).double(), torch.randn(5, 7, 12).double()
    alone = torch.stack([by_hand(block, token, patches) for token in tokens], dim=1)
    torch.testing.assert_close(block(tokens, patches), alone)


def test_dytox_logits_equal_explicit_computation():
    model, x = tiny([[4, 1], [0], [3, 5, 2]]), torch.randn(3, 3, 8, 8)
    patches = model.body(x)
    pixels = F.unfold(x, 4, stride=4).transpose(1, 2)
    layer = model.body.patch_embed.proj
    tokens = pixels @ layer.weight.flatten(1).T + layer.bias + model.body.pos_embed
    torch.testing.assert_close(patches, model.body.blocks(tokens))
    expected = torch.empty(3, 6)
    for token, (norm, linear), block in zip(model.tokens, model.heads, [[4, 1], [0], [3, 5, 2]], strict=True):
        expected[:, block] = linear(norm(by_hand(model.decoder, token, patches)))
    torch.testing.assert_close(model(x), expected)
    assert model.blocks == ((4, 1), (0,), (3, 5, 2))
    assert model.task_index(torch.arange(6)).tolist() == [1, 0, 2, 2, 0, 2]


def test_dytox_only_learned_tasks_have_logits_and_gradients():
    model, x = tiny(), torch.randn(4, 3, 8, 8)
    everything = model(x)
    model.learnt[[0, 2]] = torch.tensor([1.0, 0.01])
    some = model(x)
    assert torch.equal(some[:, [0, 1, 4, 5]], everything[:, [0, 1, 4, 5]])
    assert some[:, 2:4].unique().tolist() == [-1e4]
    F.cross_entropy(some, torch.tensor([0, 1, 4, 5])).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"tokens.0", "heads.2.1.weight", "body.pos_embed"} < reached
    assert not any(name.startswith(("tokens.1", "heads.1.", "divergence")) for name in reached)
    # The logits of the absent task are so low that they do not change the loss of samples of other tasks.
    without = F.cross_entropy(everything[:, [0, 1, 4, 5]], torch.arange(4))
    torch.testing.assert_close(F.cross_entropy(some, torch.tensor([0, 1, 4, 5])), without)
    assert torch.isfinite(F.cross_entropy(some, torch.tensor([2, 2, 3, 3])))


def test_assign_classes_replaces_blocks_or_raises():
    model, x = tiny(), torch.randn(2, 3, 8, 8)
    before = model(x)
    model.assign_classes([(1, 4), (0, 5), (2, 3)])
    assert model.blocks == ((1, 4), (0, 5), (2, 3))
    assert torch.equal(model(x)[:, [1, 4, 0, 5, 2, 3]], before)
    again = tiny()
    again.load_state_dict(model.state_dict())
    assert again.blocks == model.blocks
    model.learnt[1] = 1
    # These are the same tasks in another order.
    model.assign_classes([(2, 3), (5, 0), (1, 4)])
    assert model.blocks == ((1, 4), (0, 5), (2, 3))
    for changed, blocks in (
        (model, [(0, 1), (2, 3), (4, 5)]),
        (tiny(), [(0, 1, 2), (3, 4, 5)]),
        (tiny([[0, 1], [2, 3], [4, 5]]), [(1, 4), (0, 5), (2, 3)]),
    ):
        with raises(InvalidValueError, "tasks"):
            changed.assign_classes(blocks)
    with raises(InvalidValueError, "tasks"):
        tiny().assign_classes([(1, 7), (0, 5), (2, 3)])


WRONG = {
    "image": ({"image_size": 10}, "image_size"),
    "num_heads": ({"num_heads": 5}, "width"),
    "tasks": ({"tasks": 4}, "tasks"),
    "none": ({"tasks": 0}, "tasks"),
    "twice": ({"tasks": [[0, 1], [1, 2, 3, 4, 5]]}, "tasks"),
    "empty": ({"tasks": [[], [0, 1, 2, 3, 4, 5]]}, "tasks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_dytox_invalid_arguments_raise(case):
    options, argument = WRONG[case]
    with raises(InvalidValueError, argument):
        tiny(**options)


def test_dytox_images_of_another_shape_raise():
    with raises(InvalidValueError, "image_size"):
        tiny()(torch.zeros(2, 3, 12, 12))


@pytest.mark.parametrize("tasks", [3, [[5, 0], [1, 2], [3, 4]]])
def test_dytox_is_created_from_a_recipe(tasks):
    parser = ArgumentParser()
    parser.add_subclass_arguments(Classifier, "model")
    network = {"class_path": "lightning_fcl.models.DyTox", "init_args": {**TINY, "tasks": tasks, "num_classes": 6}}
    arguments = {"num_classes": 6, "model": network, "task_incremental": True}
    config = parser.parse_object({"model": {"class_path": "lightning_fcl.Classifier", "init_args": arguments}})
    model = parser.instantiate(config).model.model
    assert isinstance(model, DyTox) and model.sizes == [2, 2, 2]


@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_dytox_without_its_method_is_trained(fit, max_vectorized_clients):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3, 8, 8)).astype(np.float32), np.arange(60) % 6
    scenario = {
        "num_tasks": 3,
        "num_clients": 2,
        "rounds_per_task": 1,
        "classes_per_client": (2, 2),
        "sample_fraction": (0.5, 0.5),
    }
    stream = FederatedStream.from_arrays(x, y, scenario=FedViTScenario(**scenario), batch_size=4, seed=0)
    model = tiny([[0, 3], [1, 4], [2, 5]])
    position, token = model.position.clone(), model.tokens[0].detach().clone()
    task = Classifier(model, 6, lambda params: torch.optim.SGD(params, lr=0.1), task_incremental=True)
    trainer = fit(task, stream, max_vectorized_clients=max_vectorized_clients, seed=0)
    assert trainer.strategy.federation.local_trainer.num_vectorized_clients == max_vectorized_clients
    assert torch.equal(model.position, position) and not model.learnt.any()
    assert not torch.equal(model.tokens[0], token)
