"""Tests of Replay with a transform: results equal hand computations, also vectorized and after a resumed fit."""

import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from kept import memory_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn
from torch.nn import functional as F

from lightning_fcl import FederatedStream, rng
from lightning_fcl.callbacks import FLwF2T, ICaRL, Method, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.local_training.sequential import SequentialTrainer
from lightning_fcl.local_training.vectorized import VectorizedTrainer
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.methods.replay_samples import check_transform

GLOBAL = np.random.default_rng(5)


class Noise:
    """A transform that adds normal noise and records each result."""

    def __init__(self, scale=0.5):
        self.scale, self.made = scale, []

    def __call__(self, x):
        noisy = x + self.scale * self.draw(x)
        self.made.append(noisy.clone())
        return noisy

    def draw(self, x):
        return torch.randn(x.shape)


class DrawsByTorch(Noise):
    def __init__(self):
        super().__init__()
        self.generators = {"torch": torch.Generator().manual_seed(3)}

    def draw(self, x):
        return torch.randn(x.shape, generator=self.generators["torch"])


class DrawsByNumPy(Noise):
    def __init__(self):
        super().__init__()
        self.generators = {"rng": np.random.default_rng(3), "state": np.random.RandomState(3)}

    def draw(self, x):
        both = [generator.normal(size=x.shape) for generator in self.generators.values()]
        return torch.tensor(sum(both), dtype=x.dtype)


class DrawsByPython(Noise):
    def __init__(self):
        super().__init__()
        self.generators = {"random": random.Random(3)}

    def draw(self, x):
        return torch.tensor([self.generators["random"].gauss(0, 1) for _ in x])


class DrawsByGlobals(Noise):
    def draw(self, x):
        return torch.tensor(np.random.normal(size=x.shape) + random.random(), dtype=x.dtype)


NOISES = [Noise, DrawsByTorch, DrawsByNumPy, DrawsByPython, DrawsByGlobals]


class Drawn(torch.utils.data.Dataset):
    """A dataset that adds noise to a sample each time the sample is read."""

    def __init__(self, number=160):
        self.x = torch.randn(number, 6, generator=torch.Generator().manual_seed(0))
        self.y = torch.arange(number) % 4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(6), int(self.y[index])


class Own(L.LightningModule):
    """A module with a custom training step. Clients with equal batch shapes train in one vectorized step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Batches(Callback):
    """Records the batches of sequential training, with their clients and rounds."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        current = trainer.strategy.current_round
        self.seen.append((current.client_round.client_id, current.round_idx, [part.clone() for part in batch]))


def bits(samples):
    """Return the samples as a sorted list of bytes."""
    return sorted(sample.numpy().tobytes() for sample in samples)


def drawing_stream(**options):
    return FederatedStream(Drawn(), ClassIncremental(2, 2), IID(4), batch_size=8, seed=0, **options)


def with_noise(seed, *key):
    """Return a function that adds noise to samples. ``seed`` and ``key`` determine the noise."""
    generator = torch.Generator().manual_seed(rng.derive_seed(seed, "replay transform", "Replay", *key))
    return lambda x: x + 0.5 * torch.stack([torch.randn(x.shape[1:], generator=generator) for _ in x])


@pytest.mark.seconds
def test_replay_transform_federation_equals_hand_computation(fit, make_stream, make_task):
    """The transform adds noise to the replay samples of a batch. The noise depends on seed, client, round and batch."""
    seen = []
    for transform in (None, Noise()):
        batches = Batches()
        options = {"max_vectorized_clients": 1, "local_epochs": 2, "seed": 7}
        fit(make_task(), make_stream(), [Replay(5, transform=transform), batches], **options)
        seen.append(batches.seen)
    place, changed = {}, 0
    for (client, number, (x, y)), (other, also, (noisy, labels)) in zip(*seen, strict=True):
        assert (client, number) == (other, also) and torch.equal(y, labels)
        step = place[client, number] = place.get((client, number), -1) + 1
        joined = (noisy != x).any(dim=1)
        first = len(x) - int(joined.sum())
        assert not joined[:first].any()
        if first < len(x):
            expected = with_noise(7, client, number, step)(x[first:])
            assert torch.equal(noisy[first:], expected)
            changed += len(expected)
    # In the second experience, 3 clients replay 5 samples in each of 2 local epochs.
    assert changed == 2 * 5 * 3


def test_replay_transform_plain_trainer_equals_hand_loop(make_task, samples, train, by_hand, assert_same):
    task, copied, noise = make_task(), make_task(), Noise()
    method = Replay(11, transform=noise)
    first, second = samples([0, 2]), samples([1, 3], seed=1)
    train(task, [method], first)
    by_hand(copied, first)
    assert noise.made == []
    kept_x, kept_y = memory_of(method)["x"].clone(), memory_of(method)["y"].clone()
    train(task, [method], second)

    def mix(epoch, i, x, y):
        key = rng.make_client_keys(0, ["local"], 1, epoch, "Replay", "rehearse")
        size = min(11, len(y))
        orders = [rng.random_uint64(key, 11, number << 32)[0].argsort() for number in range(i * size // 11 + 2)]
        rows = torch.from_numpy(np.concatenate(orders)[i * size : (i + 1) * size].astype(np.int64))
        augmented = with_noise(0, "local", 1, epoch, i)(kept_x[rows])
        return torch.cat([x, augmented]), torch.cat([y, kept_y[rows]])

    by_hand(copied, second, mix=mix)
    assert_same(task, copied)
    assert len(noise.made) > 11


@pytest.mark.seconds
@pytest.mark.parametrize("data", ["arrays", "dataset"])
@pytest.mark.parametrize("size", [1, "auto"])
def test_replay_transform_identity_is_bitwise_identical_to_none(fit, make_stream, make_task, size, data):
    """With an identity transform, the weights are bitwise identical to the weights without a transform.

    The transform and the module of some cases draw from the global generators.
    """

    def discards(x):
        torch.rand(3), np.random.rand(), random.random()
        return x

    class Draws(Own):
        def training_step(self, batch, batch_idx):
            noise = torch.rand(()) + np.random.rand() + random.random() if size == 1 else 0.0
            return super().training_step(batch, batch_idx) * (1 + noise)

    for make in (make_task, Draws):
        states = []
        for transform in (None, discards):
            task = make()
            stream = make_stream(rounds_per_experience=2) if data == "arrays" else drawing_stream()
            fit(task, stream, [Replay(9, update="round", transform=transform)], max_vectorized_clients=size, seed=0)
            states.append(task.state_dict())
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "make_noise"),
    [*(("arrays", one) for one in NOISES), ("dataset", Noise), ("dataset", DrawsByNumPy), ("own step", DrawsByTorch)],
)
def test_replay_transform_sequential_draws_equal_vectorized(fit, make_stream, make_task, kind, make_noise):
    made, states, trainers = [], [], []
    workers = [0, 2] if kind == "dataset" and make_noise is Noise else [0, 0]
    for size, number in zip((1, "auto"), workers, strict=True):
        noise, task = make_noise(), Own() if kind == "own step" else make_task()
        words = {"rounds_per_experience": 2, "num_clients": 4}
        stream = make_stream(**words) if kind != "dataset" else drawing_stream(num_workers=number)
        methods = [ICaRL(8), Replay(9, transform=noise)] if kind == "arrays" else [Replay(9, transform=noise)]
        trainer = fit(task, stream, methods, max_vectorized_clients=size, local_epochs=2, seed=0)
        trainers.append(type(trainer.strategy.federation.local_trainer))
        made.append(bits(noise.made))
        states.append(task.state_dict())
    assert trainers == [SequentialTrainer, StepTrainer if kind == "own step" else VectorizedTrainer]
    assert len(made[0]) > 9 and made[0] == made[1]
    # Every draw has a new augmentation.
    assert len(set(made[0])) == len(made[0])
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-5)


def states_of(noise):
    """Return the states of the generators of a transform."""
    read = {"torch": lambda g: g.get_state().tolist(), "random": random.Random.getstate}
    read |= {"rng": lambda g: g.bit_generator.state, "state": lambda g: str(g.get_state())}
    return {name: read[name](one) for name, one in noise.generators.items()}


@pytest.mark.seconds
@pytest.mark.parametrize("make_noise", [DrawsByTorch, DrawsByNumPy, DrawsByPython])
def test_replay_transform_restores_its_generators(fit, make_stream, make_task, make_noise):
    noise, results = make_noise(), []
    before = states_of(noise)
    for _ in range(2):
        task = make_task()
        fit(task, make_stream(), [Replay(9, transform=noise)], seed=0)
        results.append(bits(noise.made))
        noise.made = []
        assert states_of(noise) == before
        # Advance the generator, so that the second fit starts from a different state.
        noise.draw(torch.zeros(6))
        before = states_of(noise)
    assert results[0] and results[0] == results[1]


@pytest.mark.seconds
def test_replay_transform_global_generator_is_seeded_and_restored(fit, make_stream, make_task):
    def shifts(x):
        return x + float(GLOBAL.normal())

    states, before = [], GLOBAL.bit_generator.state
    for _ in range(2):
        task = make_task()
        fit(task, make_stream(), [Replay(9, transform=shifts)], seed=0)
        assert GLOBAL.bit_generator.state == before
        GLOBAL.normal()
        before = GLOBAL.bit_generator.state
        states.append(task.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.seconds
def test_replay_transform_in_place_keeps_stored_samples(fit, make_stream, make_task):
    def in_place(x):
        return x.add_(1.0)

    stores = []
    for transform in (None, in_place):
        trainer = fit(make_task(), make_stream(), [Replay(9, transform=transform)], seed=0)
        stores.append([trainer.strategy.server.client_store[client]["Replay"]["x"] for client in "012"])
    assert all(torch.equal(one, other) for one, other in zip(*stores, strict=True))


@pytest.mark.seconds
def test_replay_samples_keep_augmentation_of_dataset(fit, make_task):
    """Without `transform`, each replay sample in a batch is bitwise identical to a stored sample."""
    batches, stream = Batches(), drawing_stream()
    trainer = fit(
        make_task(), stream, [Replay(9), batches], max_vectorized_clients=1, local_epochs=2, max_epochs=3, seed=0
    )
    raw = Drawn().x
    joined = 0
    for client in stream.plan.clients:
        kept = trainer.strategy.server.client_store[client]
        # Read the stored samples that the last round replayed.
        stored = kept.get("Replay/within", kept["Replay"])["x"]
        assert not any(torch.equal(one, other) for one in stored for other in raw)
        rows = [x[8:] for own, number, (x, _) in batches.seen if (own, number) == (client, 2) and len(x) > 8]
        assert all(any(torch.equal(row, one) for one in stored) for row in torch.cat(rows))
        joined += len(torch.cat(rows))
    assert joined > 9


@pytest.mark.seconds
def test_replay_transform_resumed_fit_is_bitwise_identical(fit, make_stream, make_task, tmp_path):
    stream, options = {"rounds_per_experience": 2}, {"seed": 0, "participation": 0.7}
    whole, saver = make_task(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    methods = [FLwF2T(), Replay(9, update="round", transform=DrawsByNumPy())]
    fit(whole, make_stream(**stream), [*methods, saver], trainer_args={"enable_checkpointing": True}, **options)
    for epoch in (0, 2):
        again, methods = make_task(seed=9), [FLwF2T(), Replay(9, update="round", transform=DrawsByNumPy())]
        fit(again, make_stream(**stream), methods, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **options)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_replay_checkpoint_with_other_transform_raises(fit, make_stream, make_task, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(make_task(), make_stream(), [Replay(9, transform=Noise()), saver], trainer_args={"enable_checkpointing": True})
    with raises(InvalidValueError, "methods", code="other-recipe"):
        fit(make_task(), make_stream(), [Replay(9)], ckpt_path=tmp_path / "epoch=0.ckpt")


class Dicts(Drawn):
    def __getitem__(self, index):
        return {"x": self.x[index], "weight": torch.ones(()), "labels": int(self.y[index])}


class ReadsDicts(Own):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"]) * batch["weight"][:, None], batch["labels"])


@pytest.mark.seconds
def test_replay_transform_gets_whole_dict(fit):
    made = []

    def halves(sample):
        made.append(sorted(sample))
        return {**sample, "weight": sample["weight"] / 2}

    states = []
    for transform in (None, halves, lambda sample: sample):
        task = ReadsDicts()
        stream = FederatedStream(Dicts(), ClassIncremental(2), IID(2), batch_size=8, seed=0)
        fit(task, stream, [Replay(8, transform=transform)], seed=0)
        states.append(task.net.weight.detach())
    assert made and all(names == ["labels", "weight", "x"] for names in made)
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])


@pytest.mark.seconds
@pytest.mark.parametrize("size", [1, "auto"])
def test_replay_transform_applies_to_samples_drawn_per_step(fit, make_stream, make_task, size):
    """A custom method draws two replay samples per step and pulls the outputs for these samples to zero."""

    class Pulls(Method):
        replay_batch_size = 2

        def __init__(self, transform):
            super().__init__()
            self.transform = transform

        @property
        def replay_transform(self):
            return self.transform

        def replay_samples(self, client):
            return client.method_state or None

        def penalty(self, client, step):
            if not step.replay_samples:
                return 0.0
            return step.replay_weight * step.forward_fn(step.replay_samples["x"]).square().mean()

        def update_client_state(self, client, trained_state, data):
            return {"x": data[0][:5], "y": data[1][:5]}

    class OfLastRound(Callback):
        """Deletes the recorded calls of earlier rounds and of the trial steps before the first round."""

        def on_train_epoch_start(self, trainer, pl_module):
            made.clear()

    def run(transform):
        task = make_task()
        fit(task, make_stream(), [Pulls(transform), OfLastRound()], max_vectorized_clients=size, seed=0)
        return task.state_dict()

    def noisy(sample):
        made.append((sample["x"].clone(), sample["x"] + torch.randn(6)))
        return {**sample, "x": made[-1][1]}

    made = []
    plain, same, other = run(None), run(dict), run(noisy)
    assert all(torch.equal(value, same[name]) for name, value in plain.items())
    assert any(not torch.equal(value, other[name]) for name, value in plain.items())
    key = rng.make_client_keys(0, ["0"], 1, "recall", "Pulls")
    torch.manual_seed(rng.derive_seed(int(key[0]), "replay transform", "Pulls", 0))
    noise = torch.randn(6)
    # The transform has added this noise to one of the recorded samples.
    assert any(torch.equal(after, before + noise) for before, after in made)
    assert len({after.numpy().tobytes() for _, after in made}) == len(made) > 12


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            lambda x: x[:3],
            r"keep the shape and dtype of `x` in a replay sample, \(6,\) and torch.float32, but got \(3,\)",
        ),
        (lambda x: x.double(), "but got .* and torch.float64. Move changes of shape or dtype into the dataset"),
        (lambda x: x.tolist(), "but got list"),
        (lambda x: x.convert("RGB"), r"a tensor of shape \(6,\), but it raised AttributeError: .*convert"),
    ],
)
def test_replay_transform_changing_sample_raises_before_first_round(fit, make_stream, make_task, transform, message):
    task = make_task()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        fit(task, make_stream(), [Replay(9, transform=transform)])
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda sample: {"y": sample["y"]}, "`x` in a replay sample, .* but got a dict without this name"),
        (lambda sample: {**sample, "x": None}, "`x` in a replay sample, .* but got NoneType"),
    ],
)
def test_check_transform_dict_without_value_raises(transform, message):
    with pytest.raises(ValueError, match=message):
        check_transform(transform, {"x": torch.zeros(1, 6), "y": torch.zeros(1)})


def test_replay_transform_plain_trainer_raises_on_first_replay_samples(make_task, samples, train):
    method, data = Replay(9, transform=lambda x: x[:3]), samples()
    train(make_task(), [method], data)
    with pytest.raises(ValueError, match="keep the shape and dtype of `x`"):
        train(make_task(), [method], data)


def test_replay_transform_not_callable_raises_in_constructor():
    with pytest.raises(InvalidTypeError, check=lambda error: error.argument == "transform"):
        Replay(transform="flip")


def test_replay_transform_is_parsed_from_class_path():
    pytest.importorskip("torchvision")
    parser = ArgumentParser()
    parser.add_subclass_arguments(Method, "method")
    flip = {"class_path": "torchvision.transforms.v2.RandomHorizontalFlip", "init_args": {"p": 1.0}}
    both = {"class_path": "torchvision.transforms.v2.Compose", "init_args": {"transforms": [flip, flip]}}
    image = torch.arange(12.0).view(1, 3, 4)
    for given, expected in ((flip, image.flip(-1)), (both, image)):
        spoken = {"method": {"class_path": "lightning_fcl.callbacks.Replay", "init_args": {"transform": given}}}
        method = parser.instantiate(parser.parse_object(spoken)).method
        assert torch.equal(method.transform(image), expected)
        assert method.fingerprint()["transform"] == given["class_path"].rpartition(".")[2]
