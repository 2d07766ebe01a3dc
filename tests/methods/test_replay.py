"""Tests of Replay: the samples that a buffer keeps, and the samples that are added to batches."""

import lightning.pytorch as L
import pytest
import torch
from kept import memory_of
from raising import raises

from lightning_fcl import FederatedStream, rng
from lightning_fcl.callbacks import FedProx, ICaRL, Replay
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.methods.context import Client


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(labels, first=0):
    """Return samples with the given labels. The input of a sample is the sample's number, counted from ``first``."""
    y = torch.tensor(labels)
    return [torch.arange(first, first + len(y)).float()[:, None], y]


def numbers(memory):
    return memory["x"][:, 0].int().tolist()


def learn(method, parts, seed=0, experiences=None):
    """Return the client state after one round per part of the data. By default, each round is an experience."""
    memory, rng, module = {}, generator(seed), Reader()
    for round_idx, part in enumerate(parts):
        experience = round_idx if experiences is None else experiences[round_idx]
        client = Client(memory, client_round=ClientRound("a", round_idx, experience), module=module, generator=rng)
        ends = method.update_client_state if method.update == "round" else method.end_experience
        memory = ends(client, module.state_dict(), part)
    return memory


def assert_consistent(memory, parts):
    """Raise AssertionError if a replay sample is duplicated, or does not have its original label."""
    labels = torch.cat([y for _, y in parts])
    assert len(set(numbers(memory))) == len(memory["y"])
    assert memory["y"].tolist() == labels[numbers(memory)].tolist()


def test_replay_refresh_replaces_only_samples_of_current_task():
    method, first, second, third = Replay(3, "refresh", "round"), data([1] * 8), data([1] * 8, 8), data([2] * 8, 16)
    memory = learn(method, [first, second, third], experiences=[0, 0, 1])
    assert memory["task"].tolist() == [0, 0, 0, 1, 1, 1] and memory["y"].tolist() == [1, 1, 1, 2, 2, 2]
    assert set(numbers(memory)[:3]) <= set(range(8, 16)) and set(numbers(memory)[3:]) <= set(range(16, 24))
    again = method.update_client_state(
        Client(memory, client_round=ClientRound("a", 3, 1), generator=generator()), {}, data([2] * 8, 24)
    )
    assert numbers(again)[:3] == numbers(memory)[:3] and set(numbers(again)[3:]) <= set(range(24, 32))
    assert_consistent(again, [first, second, third, data([2] * 8, 24)])


def test_replay_refresh_chooses_samples_at_random():
    chosen = {tuple(sorted(numbers(learn(Replay(2, "refresh", "round"), [data([0] * 4)], s)))) for s in range(100)}
    # With 100 seeds, all 6 pairs of the four samples are chosen.
    assert len(chosen) == 6


def test_replay_class_balanced_gives_equal_shares():
    parts = [data([0] * 30 + [1] * 2), data([2] * 5, 32), data([3, 3] + [0] * 10, 37)]
    # The 12 places are divided equally among 2, 3 and 4 classes. A class with too few samples gets fewer places.
    expected = [[6, 2], [4, 2, 4], [3, 2, 3, 2]]
    for rounds, counts in enumerate(expected, start=1):
        memory = learn(Replay(12, "class-balanced", "round"), parts[:rounds])
        assert memory["y"].bincount().tolist() == counts
        assert_consistent(memory, parts)


@pytest.mark.parametrize("policy", ["reservoir", "class-balanced"])
def test_replay_buffer_fills_up_to_memory_size(policy):
    parts = [data([i % 4 for i in range(10)], 10 * r) for r in range(6)]
    for max_size in (1, 3, 7, 100):
        memory = learn(Replay(max_size, policy, "round"), parts)
        assert len(memory["y"]) == len(memory["priority"]) == min(max_size, 60)
        assert_consistent(memory, parts)


@pytest.mark.seconds
@pytest.mark.parametrize("policy", ["reservoir", "class-balanced"])
def test_replay_reservoir_is_uniform_over_offered_samples(policy):
    draws, kept, parts = 300, 6, [data([0] * 4), data([0] * 16, 4), data([0] * 10, 20)]
    counts = torch.zeros(30)
    for seed in range(draws):
        counts[numbers(learn(Replay(kept, policy, "round"), parts, seed))] += 1
    expected = draws * kept / 30
    chi_square = ((counts - expected) ** 2 / (expected * (1 - kept / 30))).sum() * 29 / 30
    # With 29 degrees of freedom, 0.1 % of the values are above 58.3, and 0.04 % are below 10.
    assert 10 < chi_square < 58.3


@pytest.mark.parametrize("policy", ["reservoir", "class-balanced", "refresh"])
@pytest.mark.parametrize(("share", "size"), [(0.25, 10), (0.05, 2), (1.0, 40), (0.001, 1), (1, 1)])
def test_replay_fractional_memory_size_is_share_of_stream(policy, share, size):
    method, memory = Replay(share, policy, "round"), {}
    for round_idx in range(4):
        client_round = ClientRound("a", round_idx, 0, num_samples=10, num_stream_samples=40)
        memory = method.update_client_state(
            Client(memory, client_round=client_round, generator=generator()), {}, data([0, 1] * 5, 10 * round_idx)
        )
    # The policy "refresh" keeps samples of the last round only.
    assert len(memory["y"]) == (min(size, 10) if policy == "refresh" else size)


def test_replay_fractional_memory_size_without_stream_raises(make_task, samples, train):
    with raises(InvalidValueError, "memory_size"):
        train(make_task(), [Replay(0.5)], samples())


def test_replay_include_base_without_federation_raises(make_task, samples, train):
    with pytest.raises(InvalidValueError, match="but got a Trainer without a federation"):
        train(make_task(), [Replay(8, include_base=True)], samples())


def test_replay_update_sets_when_samples_are_stored():
    for update, sizes in (("experience", [0, 4, 4, 8]), ("round", [4, 8, 12, 16])):
        method, memory = Replay(100, "reservoir", update), {}
        for round_idx, size in enumerate(sizes):
            client_round = ClientRound("a", round_idx, round_idx // 2, is_last_round=round_idx % 2 == 1)
            client, samples = (
                Client(memory, client_round=client_round, generator=generator()),
                data([0] * 4, 4 * round_idx),
            )
            client.method_state = memory = method.update_client_state(client, {}, samples)
            if client_round.is_last_round:
                memory = method.end_experience(client, {}, samples)
            assert len(memory.get("y", [])) == size


@pytest.mark.parametrize("policy", ["reservoir", "class-balanced", "refresh"])
def test_replay_selection_uses_only_its_generator(policy):
    parts, method = [data([0, 1] * 10), data([1, 2] * 10, 20)], Replay(8, policy, "round")
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), numbers(learn(method, parts, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert numbers(learn(method, parts, seed=3)) == first
    assert numbers(learn(method, parts, seed=4)) != first


def replayed(memory, fit=0):
    """Return a function that adds a window of the shuffled buffer to each batch, as a plain Trainer does."""

    def mix(epoch, i, x, y):
        if not memory:
            return x, y
        number = len(memory["y"])
        size, key = min(number, len(y)), rng.make_client_keys(0, ["local"], fit, epoch, "Replay", "rehearse")
        places = range(i * size, (i + 1) * size)
        orders = {p // number: rng.random_uint64(key, number, (p // number) << 32)[0].argsort() for p in places}
        window = torch.tensor([int(orders[p // number][p % number]) for p in places])
        return torch.cat([x, memory["x"][window]]), torch.cat([y, memory["y"][window]])

    return mix


@pytest.mark.parametrize("kind", [Replay, ICaRL])
def test_replay_plain_trainer_adds_shuffled_samples_to_every_batch(make_task, train, kind):
    """The buffer is sorted by class or age. Without shuffling, the stored samples of a batch would have one class."""
    x, y = torch.randn(32, 6), torch.full((32,), 3)
    old_x, old_y = torch.arange(24.0)[:, None].repeat(1, 6), torch.arange(24) // 8
    joined = []

    class Remembering(kind):
        def replay_samples(self, client):
            return old_x, old_y

        def penalty(self, client, step):
            joined.append(step.x[len(step.x) - 8 :, 0].int().tolist())
            return super().penalty(Client(client.method_state), step)

    train(make_task(), [Remembering()], (x, y), epochs=2)
    assert len(joined) == 8
    for epoch in (joined[:4], joined[4:]):
        # Each stored sample is added once before any sample is repeated.
        assert sorted(epoch[0] + epoch[1] + epoch[2]) == list(range(24))
    # The order differs between epochs.
    assert joined[:4] != joined[4:]
    classes = [len({row // 8 for row in batch}) for batch in joined]
    # Measured: a batch has samples of 2.8 of 3 classes on average. Without shuffling it has samples of 1 class.
    assert sum(classes) > 2 * len(classes)


def test_replay_oversample_repeats_to_number_of_offered_samples():
    parts = [(torch.arange(20.0)[:, None] + 20 * part, torch.full((20,), part)) for part in range(3)]
    once, repeated = (learn(Replay(7, "reservoir", oversample=repeat), parts) for repeat in (False, True))
    x, y = Replay(7, "reservoir").replay_samples(Client(once))
    assert len(y) == 7
    many_x, many_y = Replay(7, "reservoir", oversample=True).replay_samples(Client(repeated))
    assert len(many_y) == 60
    values, counts = many_x.flatten().unique(return_counts=True)
    assert values.tolist() == x.flatten().sort().values.tolist()
    # The 7 samples are repeated until there are 60, so each sample occurs 8 or 9 times.
    assert sorted(set(counts.tolist())) == [8, 9]
    assert ((many_x.flatten() // 20).long() == many_y).all()


@pytest.mark.parametrize("policy", ["reservoir", "class-balanced"])
def test_replay_two_experiences_equals_hand_loop(make_task, samples, train, by_hand, assert_same, policy):
    task, copied, method = make_task(), make_task(), Replay(11, policy)
    first, second = samples([0, 2]), samples([1, 3], seed=1)
    train(task, [method], first)
    by_hand(copied, first)
    assert_same(task, copied)
    remembered = {name: value.clone() for name, value in memory_of(method).items()}
    assert len(remembered["y"]) == 11
    for x, y in zip(remembered["x"], remembered["y"], strict=True):
        assert any(torch.equal(x, other) and y == label for other, label in zip(*first, strict=True))
    train(task, [method], second)
    by_hand(copied, second, mix=replayed(remembered, fit=1))
    assert_same(task, copied)
    assert set(memory_of(method)["task"].tolist()) == {0, 1}


def test_replay_order_of_methods_does_not_matter(make_task, samples, train, assert_same):
    first, second, data = make_task(), make_task(), samples()
    train(first, [Replay(5, "refresh", "round"), FedProx(0.3)], data)
    train(second, [FedProx(0.3), Replay(5, "refresh", "round")], data)
    assert_same(first, second, 0)


def test_replay_batch_is_tuple_raises(make_task, samples, train):

    def pairs(items):
        return tuple(torch.stack(column) for column in zip(*items, strict=True))

    with raises(InvalidTypeError, "batch"):
        train(make_task(), [Replay(update="round")], samples(), collate=pairs)


def avalanche():
    from avalanche.training import storage_policy

    return storage_policy


BUFFERS = {
    "ReservoirSamplingBuffer": lambda policies: policies.ReservoirSamplingBuffer(12),
    "ClassBalancedBuffer": lambda policies: policies.ClassBalancedBuffer(12),
    "ClassBalancedBuffer of 6": lambda policies: policies.ClassBalancedBuffer(12, False, 6),
    "ExperienceBalancedBuffer": lambda policies: policies.ExperienceBalancedBuffer(12),
    **{
        f"ParametricBuffer by {by}": lambda policies, by=by: policies.ParametricBuffer(12, by)
        for by in (None, "class", "task", "experience")
    },
}


@pytest.mark.parametrize("max_size", [1, 5, 12, 40])
@pytest.mark.parametrize(
    ("policy", "buffer"), [("reservoir", "ReservoirSamplingBuffer"), ("class-balanced", "ClassBalancedBuffer")]
)
def test_replay_selection_equals_avalanche_buffer(policy, buffer, max_size):
    draw = generator(max_size)
    for classes in ([0, 1, 2], [8, 1, 16, 3], [31, 7, 15, 23, 2]):
        labels = [[classes[i] for i in torch.randint(len(classes), (9,), generator=draw)] for _ in range(4)]
        parts = [data(own, 9 * round_idx) for round_idx, own in enumerate(labels)]
        ours = learn(Replay(max_size, policy, "round"), parts)
        theirs = learn(Replay(buffer=getattr(avalanche(), buffer)(max_size), update="round"), parts)
        assert list(ours) == list(theirs) and 0 < len(ours["y"]) <= max_size
        assert all(torch.equal(value, theirs[entry]) for entry, value in ours.items())


@pytest.mark.parametrize("name", BUFFERS)
def test_replay_avalanche_buffer_is_stored_as_tensors(name):
    given = BUFFERS[name](avalanche())
    method = Replay(buffer=given, update="round")
    parts = [data([0, 1] * 10), data([2] * 20, 20), data([0, 3] * 10, 40)]
    memory = learn(method, parts)
    # The given buffer is a template. It stays empty, and each client gets a new buffer with the same settings.
    assert method.memory_size == 12 and len(given.buffer) == 0
    assert all(isinstance(value, torch.Tensor) for value in memory.values())
    assert_consistent(memory, parts)
    counted = torch.bincount(memory["y"], minlength=4).tolist()
    if name in ("ClassBalancedBuffer", "ParametricBuffer by class"):
        assert counted == [3, 3, 3, 3]
    elif name == "ClassBalancedBuffer of 6":
        assert counted == [2, 2, 2, 2]
    elif name.split()[-1] in ("task", "experience") or name == "ExperienceBalancedBuffer":
        assert torch.bincount(memory["task"]).tolist() == [4, 4, 4]
    assert len(memory["y"]) == (8 if "of 6" in name else 12)
    again = learn(method, parts)
    assert all(torch.equal(value, again[entry]) for entry, value in memory.items())
    assert numbers(learn(method, parts, seed=1)) != numbers(memory)


def test_replay_selection_strategy_gets_client_model(fit, make_stream, make_task):
    policies, seen = avalanche(), []

    class Nearest(policies.ExemplarsSelectionStrategy):
        def make_sorted_indices(self, strategy, data):
            seen.append({name: value.clone() for name, value in strategy.model.state_dict().items()})
            x = torch.stack([sample for sample, *_ in data])
            return strategy.model(x.to(strategy.device))[:, 0].argsort().tolist()

    results = []
    for size in (1, 3):
        task = make_task()
        stream = make_stream(rounds_per_experience=2)
        method = Replay(buffer=policies.ParametricBuffer(8, "class", Nearest()))
        trainer = fit(task, stream, [method], max_vectorized_clients=size, seed=0)
        store = trainer.strategy.server.client_store
        results.append([store[client]["Replay"]["x"] for client in stream.plan.clients])
        assert all(store[client]["Replay"]["y"].bincount().tolist() == [2] * 4 for client in stream.plan.clients)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(seen[0][name], seen[-1][name]) for name in seen[0])


def test_replay_herding_strategy_uses_module_network(fit, make_stream, make_task):
    policies, task = avalanche(), make_task()
    herding = policies.HerdingSelectionStrategy(task.model, "3")
    trainer = fit(task, make_stream(), [Replay(buffer=policies.ParametricBuffer(8, "class", herding))], seed=0)
    assert all(len(trainer.strategy.server.client_store[client]["Replay"]["y"]) == 8 for client in "012")
    assert task.training


def test_replay_buffer_that_needs_avalanche_loop_raises():
    policies = avalanche()

    class Own(policies.ReservoirSamplingBuffer):
        pass

    with raises(InvalidTypeError, "buffer"):
        Replay(buffer=Own(3))

    class Curious(policies.ExemplarsSelectionStrategy):
        def make_sorted_indices(self, strategy, data):
            return strategy.experience

    method = Replay(buffer=policies.ParametricBuffer(3, None, Curious()), update="round")
    with raises(InvalidTypeError, "Curious", value="experience"):
        learn(method, [data([0] * 5)])
    with raises(InvalidValueError, "oversample"):
        Replay(buffer=policies.ReservoirSamplingBuffer(3), oversample=True)


class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.arange(48 * 3).view(48, 3)

    def __getitem__(self, index):
        return {"ids": self.ids[index], "labels": index % 4}

    def __len__(self):
        return 48


class Reader(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale, self.sizes = torch.nn.Parameter(torch.ones(1)), []

    def training_step(self, batch, batch_idx):
        assert batch["ids"].dtype == torch.int64 and (batch["ids"][:, 0] // 3 % 4 == batch["labels"]).all()
        self.sizes.append((self.trainer.current_epoch, len(batch["labels"])))
        return (self.scale * batch["ids"].float().mean()).square() * 1e-9

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("policy", ["reservoir", "class-balanced", "refresh"])
def test_replay_stores_samples_in_dicts(fit, policy):
    stream = FederatedStream(Sentences(), ClassIncremental(2), IID(2), batch_size=100, seed=0)
    task = Reader()
    trainer = fit(task, stream, [Replay(6, policy)], seed=0)
    own = [len(stream.plan.train[round_idx][client]) for round_idx in (0, 1) for client in "01"]
    assert [size for _, size in task.sizes] == [own[0], own[1], own[2] + 6, own[3] + 6]
    for client in "01":
        memory = trainer.strategy.server.client_store[client]["Replay"]
        assert (memory["sample.ids"][:, 0] // 3 % 4 == memory["class"]).all()
        if policy == "class-balanced":
            assert memory["class"].bincount().max() == 2
