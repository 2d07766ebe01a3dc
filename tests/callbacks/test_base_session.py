"""Tests of the base session: training equals a hand-written loop. Freezing, caching, resuming and testing work."""

import copy
import math
from functools import partial

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import BaseSession, ContinualMetrics, MeanOutputLoss, Replay
from lightning_fcl.callbacks.pretrain import mirrored_and_shifted
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.scenarios import ODFCLScenario
from lightning_fcl.errors import DamagedFileError, InvalidValueError, UnknownNameError
from lightning_fcl.models import MLP, DSICNet
from lightning_fcl.models.quantization import Int8Backbone, fold_batchnorm
from lightning_fcl.rng import seed_all

SMALL = {
    "num_people": 6, "num_base_people": 2, "num_sessions": 2, "num_nodes": 2, "train_per_class": 7, "test_per_class": 3,
    "rounds_per_session": 2,
}  # fmt: skip


def faces(people=8, images=10, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(people), images))
    pattern = rng.normal(size=(people, 1, 16, 16))
    x = 0.5 * rng.normal(size=(len(y), 1, 16, 16)) + pattern[y]
    return ArrayDataset(x.astype(np.float32), y, None, tuple(f"person {c}" for c in range(people)))


def make_faces(data=None, scenario_args=SMALL, **kwargs):
    data = faces() if data is None else data
    return FederatedStream(data, ODFCLScenario(**scenario_args), **{"batch_size": 4, "seed": 0, **kwargs})


def make_net(classes=6, seed=0):
    torch.manual_seed(seed)
    return Classifier(
        DSICNet(classes, (16, 16)), classes, lambda params: torch.optim.SGD([p for p in params if p.requires_grad], 0.1)
    )


class Start(Callback):
    """Stores the state that the first round starts from."""

    def on_train_start(self, trainer, pl_module):
        self.state = snapshot(pl_module)


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(left, right, tolerance=0.0):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def part(state, prefix):
    return {name: value for name, value in state.items() if name.startswith(prefix)}


HEAD = {"model.backbone.*": "constant"}
QUICK = {"pretrain_epochs": 1, "epochs": 1, "augment": False, "batch_size": 8, "backbone": "float"}


@pytest.fixture
def run(fit):
    """Return a function that fits a small network.

    That function returns the task, and the state of the task before the first round.
    """

    def go(session=(), others=(), task=None, stream=None, reductions=HEAD, **kwargs):
        task, start = task or make_net(), Start()
        session = session if isinstance(session, BaseSession) else BaseSession(**{**QUICK, **dict(session)})
        stream = stream or make_faces()
        go.trainer = fit(task, stream, [session, start, *others], reductions=reductions, seed=0, **kwargs)
        return task, start.state

    return go


@pytest.mark.parametrize("pretrain_epochs", [0, 2])
def test_base_session_equals_hand_written_loop(run, pretrain_epochs):
    stream = make_faces()
    options = {"pretrain_epochs": pretrain_epochs, "epochs": 3, "lr": 1e-3, "weight_decay": 0.1}
    _, state = run({**QUICK, **options}, stream=stream)
    by_hand = make_net().model.train()
    own = by_hand.head.classifier
    seed_all(0, "base session")

    def train(indices, first, classes, epochs):
        x, y = stream.get_samples(indices)
        loader = DataLoader(TensorDataset(x, y - first), 8, shuffle=True, drop_last=True)
        optimizer = torch.optim.AdamW(by_hand.parameters(), 1e-3, weight_decay=0.1)
        steps, step = epochs * len(loader), 0
        for _ in range(epochs):
            for images, labels in loader:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / steps)) / 2
                optimizer.zero_grad()
                F.cross_entropy(by_hand(images)[:, :classes], labels).backward()
                optimizer.step()
                step += 1

    if pretrain_epochs:
        by_hand.head.classifier = nn.Linear(80, 2)
        assert set(stream.y[stream.plan.pretrain]) == {6, 7}
        train(stream.plan.pretrain, 6, 2, pretrain_epochs)
    by_hand.head.classifier = own
    nn.init.zeros_(own.weight)
    nn.init.zeros_(own.bias)
    train(stream.plan.base_samples, 0, 2, 3)
    fold_batchnorm(by_hand.eval())
    same({name.removeprefix("model."): value for name, value in state.items()}, snapshot(by_hand), 1e-6)


def test_base_session_rows_of_later_classes_are_zero(run):
    task, state = run({"epochs": 2, "weight_decay": 0.5})
    weight, bias = state["model.head.classifier.weight"], state["model.head.classifier.bias"]
    assert not weight[2:].any() and not bias[2:].any()
    assert (weight[:2] != 0).any() and (bias[:2] != 0).all()
    assert (task.model.head.classifier.bias != 0).all()


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("backbone", ["float", "int8"])
def test_base_session_backbone_frozen_is_bitwise_unchanged(run, backbone, max_vectorized_clients):
    task, state = run({"backbone": backbone}, max_vectorized_clients=max_vectorized_clients)
    assert (run.trainer.strategy.num_vectorized_clients > 1) == (max_vectorized_clients != 1)
    end = snapshot(task)
    same(part(end, "model.backbone."), part(state, "model.backbone."))
    assert isinstance(task.model.backbone, Int8Backbone) == (backbone == "int8")
    for name, value in part(end, "model.head.").items():
        assert not torch.equal(value, state[name]), name
    assert not any(parameter.requires_grad for parameter in task.model.backbone.parameters())
    assert all(parameter.requires_grad for parameter in task.model.head.parameters())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in task.modules())


@pytest.mark.seconds
@pytest.mark.parametrize("backbone", ["float", "int8"])
def test_base_session_constant_backbone_transmits_only_head(run, backbone):
    metrics = ContinualMetrics("none")
    stream = make_faces(faces(12), {**SMALL, "num_people": 10, "num_base_people": 4, "num_nodes": 3})
    task, _ = run({"backbone": backbone}, [metrics], make_net(10), stream)
    trainable = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    assert 4 * trainable == 24_040
    for entry in metrics.record["rounds"]:
        assert entry["upload_bytes"] == entry["download_bytes"] == dict.fromkeys(("node1", "node2", "node3"), 24_040)


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("backbone", ["float", "int8"])
def test_base_session_precomputed_latents_give_same_result(run, backbone, max_vectorized_clients):
    """Int8 sums are exact for every batch size. In floating point, the batch size can change the rounding."""
    results = []
    for latents in (False, True):
        metrics, stream = ContinualMetrics(evaluate_before_fit=True), make_faces()
        others = [MeanOutputLoss(2.0), Replay(20, "class-balanced", "round", include_base=True), metrics]
        task, state = run(
            {"backbone": backbone, "precompute_latents": latents},
            others,
            stream=stream,
            max_vectorized_clients=max_vectorized_clients,
        )
        x = stream.get_samples(np.arange(80))[0]
        assert x.shape == ((80, 64, 1, 1) if latents else (80, 1, 16, 16))
        if latents:
            with torch.no_grad():
                maps = task.model.backbone(torch.from_numpy(faces().x))
            same(x, maps, 0.0 if backbone == "int8" else 1e-5)
        results.append((state, snapshot(task), metrics.record))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1], 0.0 if backbone == "int8" else 1e-6)
    assert results[0][2]["start"] == results[1][2]["start"]


def files(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.seconds
def test_base_session_cache_gives_bitwise_same_state(run, tmp_path):
    folder = tmp_path / "kept" / "here"
    first, state = run({"cache_dir": str(folder)})
    (path,) = folder.glob("*.safetensors")
    assert files(folder) == {path.name}
    second, again = run({"cache_dir": str(folder)})
    plain, without = run()
    assert files(folder) == {path.name}
    for other in (again, without):
        same(other, state)
    for task in (second, plain):
        same(snapshot(task), snapshot(first))
    # The cached training does not depend on these settings, so the cache still has one file.
    run({"cache_dir": str(folder), "precompute_latents": True, "backbone": "int8"})
    assert files(folder) == {path.name}
    kept = load_file(path)
    save_file({**kept, "head.classifier.bias": kept["head.classifier.bias"] + 1}, path)
    _, changed = run({"cache_dir": str(folder)})
    same(changed["model.head.classifier.bias"], state["model.head.classifier.bias"] + 1)
    same(part(changed, "model.backbone"), part(state, "model.backbone"))


def test_base_session_cache_full_disk_raises_and_leaves_no_file(run, tmp_path, full_disk):
    with (
        full_disk(4096),
        pytest.raises(OSError, match=r"bytes of free disk space for .*\.safetensors, but the disk is full"),
    ):
        run({"cache_dir": str(tmp_path / "kept")})
    assert not files(tmp_path / "kept")


@pytest.mark.seconds
@pytest.mark.parametrize(
    "change",
    [
        {"pretrain_epochs": 0},
        {"epochs": 2},
        {"lr": 1e-3},
        {"weight_decay": 0.0},
        {"batch_size": 7},
        {"augment": True},
        {"stream": {"seed": 1}},
        {"stream": {"data": faces(seed=1)}},
        {"task": {"seed": 1}},
    ],
)
def test_base_session_cache_changed_setting_trains_again(run, tmp_path, change):
    cached = {"cache_dir": str(tmp_path)}
    _, state = run(cached, max_epochs=1)
    stream, task = make_faces(**change.pop("stream", {})), make_net(**change.pop("task", {}))
    copied, same_stream = copy.deepcopy(task), copy.deepcopy(stream)
    _, other = run({**cached, **change}, task=task, stream=stream, max_epochs=1)
    assert len(files(tmp_path)) == 2
    assert any(not torch.equal(other[name], state[name]) for name in state)
    _, uncached = run(change, task=copied, stream=same_stream, max_epochs=1)
    same(other, uncached)


@pytest.mark.seconds
def test_base_session_depends_only_on_stream_seed(run):
    states = []
    for drawn, seed in ((1, 0), (2, 0), (2, 1)):
        task = make_net()
        torch.manual_seed(drawn)
        states.append(run({"augment": True}, task=task, stream=make_faces(seed=seed))[1])
    same(*states[:2])
    assert any(not torch.equal(states[0][name], value) for name, value in states[2].items())


@pytest.mark.seconds
@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("backbone", ["float", pytest.param("int8", marks=pytest.mark.long)])
def test_base_session_resumed_equals_uninterrupted(run, tmp_path, backbone, latents):
    def parts():
        return [
            Replay(20, "class-balanced", "round", include_base=True),
            MeanOutputLoss(2.0),
            ContinualMetrics(evaluate_before_fit=True),
        ]

    session, whole = {"backbone": backbone, "precompute_latents": latents}, parts()
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    task, _ = run(session, [*whole, saver], trainer_args={"enable_checkpointing": True})
    for epoch in (0, 2):
        again = parts()
        continued, _ = run(session, again, make_net(seed=9), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        same(snapshot(continued), snapshot(task))
        correct = [[r["correct"] for r in callbacks[2].record["rounds"]] for callbacks in (whole, again)]
        assert correct[0] == correct[1] and again[2].record["start"] == whole[2].record["start"]


@pytest.mark.seconds
@pytest.mark.parametrize("backbone", ["float", "int8"])
def test_base_session_checkpoint_can_be_tested(run, fit, quiet, tmp_path, backbone):
    session = BaseSession(**{**QUICK, "backbone": backbone, "precompute_latents": True})
    task, _ = run(session)
    run.trainer.save_checkpoint(tmp_path / "end.ckpt")
    stream, again = make_faces(), make_net(seed=9)
    session = BaseSession(**{**QUICK, "backbone": backbone, "precompute_latents": True})
    trainer = L.Trainer(callbacks=[session], **quiet)
    (result,) = trainer.test(again, datamodule=stream, ckpt_path=tmp_path / "end.ckpt", verbose=False)
    same(snapshot(again), snapshot(task))
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        output = task.eval()(x)
    assert result["test/accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()))
    assert result["test/loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-5)
    (direct,) = run.trainer.test(task, datamodule=stream, verbose=False)
    assert direct == pytest.approx(result, rel=1e-5)


@pytest.mark.seconds
def test_base_session_second_fit_continues(run):
    def parts():
        return [Replay(20, "class-balanced", "round", include_base=True), MeanOutputLoss(2.0)]

    session = {"precompute_latents": True}
    whole, _ = run(session, parts())
    stream = make_faces()
    task, _ = run(session, parts(), stream=stream, max_epochs=2)
    run.trainer.fit_loop.max_epochs = 4
    run.trainer.fit(task, datamodule=stream)
    same(snapshot(task), snapshot(whole))


@pytest.mark.seconds
@pytest.mark.parametrize("backbone", ["float", "int8"])
def test_base_session_reused_stream_trains_new_network_on_images(run, backbone):
    session, stream = {"precompute_latents": True, "backbone": backbone}, make_faces()
    run(session, stream=stream)
    task, state = run(session, task=make_net(seed=1), stream=stream)
    other, expected = run(session, task=make_net(seed=1))
    same(state, expected)
    same(snapshot(task), snapshot(other))


@pytest.mark.seconds
def test_base_session_plain_trainer_equals_single_client_federation(run, fit):
    arguments = {**SMALL, "num_nodes": 1}
    federated, _ = run(stream=make_faces(scenario_args=arguments), max_vectorized_clients=1)
    plain = make_net()
    fit(plain, make_faces(scenario_args=arguments), [BaseSession(**QUICK)], strategy="auto")
    same(snapshot(plain), snapshot(federated))


@pytest.mark.seconds
def test_mirrored_and_shifted_flips_and_shifts_images():
    x, y = torch.rand(3, 2, 5, 6), torch.arange(3)
    padded = F.pad(torch.cat([x, x.flip(-1)]), (4, 4, 4, 4))
    collate, seen = mirrored_and_shifted((5, 6)), set()
    for _ in range(150):
        images, labels = collate(list(zip(x, y, strict=True)))
        assert torch.equal(labels, y)
        for index, image in enumerate(images):
            found = [
                (flip, i, j)
                for flip in (0, 1)
                for i in range(9)
                for j in range(9)
                if torch.equal(image, padded[index + 3 * flip, :, i : i + 5, j : j + 6])
            ]
            assert found
            seen.add(found[0])
    # The random crops and flips have 162 possible results.
    assert len(seen) > 100


def test_replay_include_base_fills_buffers_before_first_round(run):
    rounds, labels = [], []

    class Look(Callback):
        def on_round_end(self, trainer, pl_module):
            store = trainer.strategy.server.client_store
            rounds.append({c: copy.deepcopy(store[c]["Replay"]) for c in store})

    class Batches(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 0:
                labels.extend(batch[1].tolist())

    stream = make_faces()
    run(
        {"precompute_latents": True},
        [Replay(6, "class-balanced", "experience", include_base=True), Look(), Batches()],
        stream=stream,
    )
    # Node 1 trains on 7 samples of class 2, and node 2 on 7 samples of class 3. Each node also replays 3 samples of
    # each class of the base session.
    assert np.bincount(labels).tolist() == [6, 6, 7, 7]
    maps, theirs = stream.get_samples(stream.plan.base_samples)
    for node, own in (("node1", 2), ("node2", 3)):
        memory = rounds[0][node]
        assert memory["x"].shape == (6, 64, 1, 1) and memory["y"].bincount().tolist() == [3, 3]
        assert memory["task"].tolist() == [0] * 6
        for x, y in zip(memory["x"], memory["y"], strict=True):
            assert any(torch.equal(x, maps[i]) and y == theirs[i] for i in range(len(maps)))
        assert rounds[1][node]["y"].bincount(minlength=4)[[0, 1, own]].tolist() == [2, 2, 2]
    # Each node selects its own replay samples.
    assert not torch.equal(rounds[0]["node1"]["x"], rounds[0]["node2"]["x"])


def test_replay_include_base_other_policies_fill_buffers(run):
    for replay, size in (
        (Replay(0.5, "reservoir", include_base=True), 7),
        (Replay(3, "refresh", include_base=True), 6),
    ):
        run(others=[replay], max_epochs=1)
        memory = run.trainer.strategy.server.client_store["node1"]["Replay"]
        assert len(memory["y"]) == size


def test_replay_include_base_without_base_session_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "include_base"):
        fit(make_task(), make_stream(), [Replay(9, include_base=True)])
    stream = make_faces(scenario_args={**SMALL, "num_nodes": 1})
    with raises(InvalidValueError, "include_base"):
        fit(make_net(), stream, [Replay(9, include_base=True)], strategy="auto")


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Conv2d(1, 2, 3), nn.Linear(2, 6)


SMALLER = partial(DSICNet, num_classes=3, image_size=(16, 16))
HIGHER = partial(DSICNet, num_classes=6, image_size=(24, 16))
LATENTS = BaseSession(**{**QUICK, "precompute_latents": True})


@pytest.mark.parametrize(
    ("model", "data", "callbacks", "argument"),
    [
        (
            partial(MLP, [6, 5, 6]),
            None,
            [],
            "model",
        ),
        (Halves, None, [], "model.head.classifier"),
        (SMALLER, None, [], "num_classes"),
        (HIGHER, None, [], "image_size"),
        (HIGHER, "digits", [], "datamodule"),
        (HIGHER, None, [Replay(9, include_base=True), LATENTS], "callbacks"),
    ],
)
def test_base_session_incompatible_model_or_order_raises(fit, model, data, callbacks, argument):
    stream = make_faces() if data is None else FederatedStream(data)
    with raises(InvalidValueError, argument):
        fit(Classifier(model(), 6), stream, callbacks or [BaseSession(**QUICK)])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"epochs": 0}, (InvalidValueError, "epochs")),
        ({"pretrain_epochs": -1}, (InvalidValueError, "pretrain_epochs")),
        ({"backbone": "int4"}, (UnknownNameError, "backbone")),
        ({"lr": 0.0}, (InvalidValueError, "lr")),
        ({"batch_size": 1}, (InvalidValueError, "batch_size")),
    ],
)
def test_base_session_invalid_arguments_raise(arguments, expected):
    with raises(*expected):
        BaseSession(**arguments)


def check_fix_of_cache(run, folder, damage):
    """Damage the cached session, check the error of the next fit, delete the cache, and train the session again."""
    _, state = run({"cache_dir": str(folder)}, max_epochs=1)
    (path,) = folder.glob("*.safetensors")
    damage(path)
    with raises(DamagedFileError, value=path) as caught:
        run({"cache_dir": str(folder)}, max_epochs=1)
    assert caught.value.hint == "Delete the file. The next fit trains the session again."
    path.unlink()
    same(run({"cache_dir": str(folder)}, max_epochs=1)[1], state)
    assert path.is_file()


def test_base_session_cache_truncated_raises_until_deleted(run, tmp_path):
    check_fix_of_cache(run, tmp_path, lambda path: path.write_bytes(path.read_bytes()[:-20]))


def test_base_session_cache_missing_bias_raises_until_deleted(run, tmp_path):
    def drop_bias(path):
        save_file({name: value for name, value in load_file(path).items() if name != "head.classifier.bias"}, path)

    check_fix_of_cache(run, tmp_path, drop_bias)
