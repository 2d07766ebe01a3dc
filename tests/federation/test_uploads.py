"""Tests of uploads: all tensors that a client sends pass through the transforms, in simulations and on nodes."""

import hashlib

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from raising import raises
from simulation.test_ranks import METHODS
from torch import nn

from lightning_fcl import ClientSpeeds, FedBuff, FederatedStrategy
from lightning_fcl.callbacks import SCAFFOLD, ContinualMetrics, FedWEIT, Replay
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import BUILT_IN_REDUCTIONS
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.compression import Quantize, TopK
from lightning_fcl.federation.packing import pack_integers, pack_nonzero, unpack_integers, unpack_nonzero
from lightning_fcl.federation.reductions import Mean
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Stage, UploadTransform
from lightning_fcl.methods.glfc import ConcatNonzeroRows
from lightning_fcl.methods.prototypes import SparseSum
from lightning_fcl.tasks.ridge_statistics import ConcatRows


class Probe(UploadTransform):
    """An upload transform that records the number of bytes that each client sends in each round."""

    stage = Stage.COUNT

    def __init__(self):
        self.rounds = {}

    def encode(self, uploads):
        counts = self.rounds.setdefault(uploads.clients.round_idx, {})
        for row, client in enumerate(uploads.clients.client_ids):
            counts[client] = sum(value.nbytes for value in uploads.client_tensors(row).values())


class Clip(UploadTransform):
    """An upload transform that scales each client's update so that the norm over all tensors is at most ``bound``."""

    stage = Stage.CLIP
    needs_updates = True

    def __init__(self, bound):
        self.bound = bound

    def encode(self, uploads):
        norms = uploads.norms()
        uploads.scale((self.bound / norms.clamp(min=1e-300)).clamp(max=1.0) * (1 - 1e-6))


class Norms(UploadTransform):
    """An upload transform that records the norm of each update over all tensors, and the names of the tensors."""

    stage = Stage.COUNT
    needs_updates = True

    def __init__(self):
        self.norms, self.names = [], set()

    def encode(self, uploads):
        self.norms += uploads.norms().tolist()
        self.names |= {*uploads.names, *uploads.messages}


class Updates(UploadTransform):
    """A transform that needs updates instead of states, and does not change the updates."""

    stage = Stage.CLIP
    needs_updates = True


class AddsToSums(UploadTransform):
    """A transform that adds a number to each element of a round's sum, and divides by a fixed number of clients."""

    stage = Stage.NOISE

    def __init__(self, number, clients):
        self.number, self.clients, self.rounds = number, clients, []

    def on_sum(self, sums):
        self.rounds.append((sums.round, [*sums.clients]))
        for name, value in sums.values.items():
            sums.values[name] = value + self.number
            sums.denominators[name] = self.clients


class Masks(UploadTransform):
    """Secure aggregation: adds masks that cancel in the sum. The server forwards the keys of the clients."""

    stage = Stage.MASK
    sums_only = True

    def __init__(self, scale=2.0**40):
        self.scale = scale
        # Tensors that the server has received.
        self.seen = []

    def before_upload(self, exchange):
        keys = exchange.ask({client: {} for client in exchange.clients})
        everybody = torch.stack([keys[client]["key"] for client in sorted(keys)])
        exchange.ask({client: {"keys": everybody} for client in exchange.clients})

    def answer(self, client, question, memory):
        if "keys" in question:
            memory["keys"] = question["keys"]
            return {}
        memory["own"] = torch.tensor(hash_of(client))
        return {"key": memory["own"]}

    def encode(self, uploads):
        for name, value in uploads.tensors().items():
            reduction = uploads.reductions[name]
            weights = torch.tensor(uploads.weights if reduction.weighted else [1.0] * len(uploads), dtype=torch.float64)
            rows = value.double() * weights.view(-1, *[1] * (value.dim() - 1)) * self.scale
            uploads.values[name] = rows.round().long()
            for row, memory in enumerate(uploads.exchanged):
                for key in memory["keys"].tolist():
                    own = int(memory["own"])
                    if key != own:
                        low, high = sorted((key, own))
                        draws = torch.Generator().manual_seed(
                            hash_of(f"{low} {high} {name} {uploads.clients.round_idx}")
                        )
                        mask = torch.randint(-(2**62), 2**62, value.shape[1:], generator=draws)
                        uploads.values[name][row] += mask if own == low else -mask

    def make_accumulator(self):
        return IntegerSums(self.seen)

    def on_sum(self, sums):
        sums.values.update({name: value.double() / self.scale for name, value in sums.values.items()})


class IntegerSums:
    def __init__(self, seen):
        self.sums, self.seen = {}, seen

    def update(self, values, weights):
        self.seen.append(values)
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.sum(dim=0)

    def compute(self, server):
        return self.sums


def hash_of(text):
    return int.from_bytes(hashlib.sha256(str(text).encode()).digest()[:5], "little")


def run(fit, make_stream, make_task, callbacks=(), **options):
    task, metrics = make_task(), ContinualMetrics()
    trainer = fit(task, make_stream(num_clients=4, rounds_per_experience=2), [*callbacks, metrics], seed=0, **options)
    return task.state_dict(), metrics.record["rounds"], trainer


@pytest.mark.seconds
@pytest.mark.parametrize("name", METHODS)
def test_transform_receives_all_uploaded_bytes(fit, make_stream, make_task, name):
    callbacks, options = METHODS[name]()
    if "swarm" in options:
        # Run without a swarm, because a client that has missed a synchronization has no update.
        options = {}
    probe = Probe()
    _, rounds, _ = run(fit, make_stream, make_task, callbacks, upload_transforms=[probe], **options)
    assert len(rounds) == len(probe.rounds) == 4
    for number, entry in enumerate(rounds):
        assert entry["upload_bytes"] == probe.rounds[number]


@pytest.mark.seconds
@pytest.mark.parametrize("name", METHODS)
def test_transform_without_changes_is_bitwise_identical(fit, make_stream, make_task, name):
    results = []
    for transforms in ([], [Probe()]):
        callbacks, options = METHODS[name]()
        options = {} if "swarm" in options else options
        results.append(run(fit, make_stream, make_task, callbacks, upload_transforms=transforms, **options)[0])
    assert all(torch.equal(value, results[1][entry]) for entry, value in results[0].items())


@pytest.mark.seconds
@pytest.mark.parametrize("max_vectorized_clients", [1, 4])
@pytest.mark.parametrize("compression", [None, TopK(0.3), Quantize(4), TopK(0.3, bits=4)])
def test_clip_transform_bounds_joint_norm_of_upload(fit, make_stream, make_task, compression, max_vectorized_clients):
    norms, options = (
        Norms(),
        {"client_weights": "uniform", "compression": compression, "max_vectorized_clients": max_vectorized_clients},
    )
    run(fit, make_stream, make_task, [SCAFFOLD()], upload_transforms=[Clip(1e-6), norms], **options)
    assert len(norms.norms) == 16 and max(norms.norms) <= 1e-6 and max(norms.norms) > 0.99e-6
    assert any(name.startswith("SCAFFOLD.") for name in norms.names)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name", ["averages", "control variates", "prototypes at the server", "medians", "sums at the server"]
)
def test_updates_give_results_close_to_states(fit, make_stream, make_task, name):
    results = []
    for transforms in ([], [Updates()]):
        callbacks, options = METHODS[name]()
        results.append(run(fit, make_stream, make_task, callbacks, upload_transforms=transforms, **options)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.seconds
def test_stale_updates_give_results_close_to_stale_states(fit, make_stream, make_task):
    results = []
    for transforms in ([], [Updates()]):
        schedule = FedBuff(ClientSpeeds(0.01, spread=1.0), buffer_size=2)
        results.append(run(fit, make_stream, make_task, synchronization=schedule, upload_transforms=transforms)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_compression_with_stale_clients_encodes_updates(fit, make_stream, make_task):
    schedule = FedBuff(ClientSpeeds(0.01, spread=1.0), buffer_size=2)
    state, rounds, _ = run(fit, make_stream, make_task, synchronization=schedule, compression=TopK(0.3))
    assert any(entry["staleness"] for entry in rounds) and all(torch.isfinite(v).all() for v in state.values())
    plain = run(fit, make_stream, make_task, synchronization=FedBuff(ClientSpeeds(0.01, spread=1.0), buffer_size=2))[1]
    for less, more in zip(rounds, plain, strict=True):
        assert max(less["upload_bytes"].values()) < min(more["upload_bytes"].values())


def server_of(transforms, extra=None):
    torch.manual_seed(0)
    server = FederatedServer(ClientStore(), "uniform", transforms=transforms)
    module = nn.Linear(3, 2)
    server.start_fit(module, extra_tensors=extra)
    return server, module


def uploads_of(server, clients):
    return {name: value + torch.randn(clients, *value.shape) for name, value in server.state.items()}


def client_rounds(clients, number=0):
    return [ClientRound(client, number, num_samples=1) for client in clients]


def test_on_sum_changes_sums_before_division():
    adds = AddsToSums(0.5, clients=10.0)
    server, _ = server_of([adds])
    states = uploads_of(server, 3)
    server.upload(client_rounds("abc"), states)
    before, after = server.state, server.aggregate()
    for name, value in before.items():
        expected = value + ((states[name] - value).double().sum(dim=0) + 0.5) / 10
        torch.testing.assert_close(after[name], expected.float())
    assert adds.rounds == [(0, ["a", "b", "c"])]


def test_on_sum_without_clients_changes_sums():
    adds = AddsToSums(0.5, clients=10.0)
    server, module = server_of([adds])
    before, after = server.state, server.aggregate()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value + 0.05)
    server.start_round(module, round_idx=1)
    server.aggregate()
    assert adds.rounds == [(0, []), (1, [])]


@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[2], [0, 1]]])
def test_masks_cancel_in_sum_and_hide_each_upload(groups):
    masks = Masks()
    server, _ = server_of([masks], {"M.count": (torch.zeros(2), "sum")})
    plain, _ = server_of([], {"M.count": (torch.zeros(2), "sum")})
    server.exchange([*"abc"], ranks=Alone(), hosts=lambda client: True)
    states = uploads_of(server, 3)
    for rows in groups:
        part = {name: value[rows] for name, value in states.items()}
        server.upload(client_rounds(["abc"[row] for row in rows]), part)
        plain.upload(client_rounds(["abc"[row] for row in rows]), part)
    torch.testing.assert_close(server.aggregate(), plain.aggregate(), rtol=0, atol=1e-6)
    for values in masks.seen:
        assert all(value.dtype == torch.int64 for value in values.values())
        # An update without a mask would be below this bound.
        assert float(values["weight"].double().abs().min()) > 2.0**40
    assert server.record.upload_bytes["a"] == 8 + 8 * (6 + 2 + 2) and server.record.download_bytes["a"] == 3 * 8


class Alone:
    rank, num_ranks = 0, 1

    def all_gather_object(self, value):
        return [value]


@pytest.mark.seconds
def test_secure_aggregation_is_close_to_plain_aggregation(fit, make_stream, make_task):
    results = [
        run(fit, make_stream, make_task, [Replay(10)], upload_transforms=transforms, participation=3)[0]
        for transforms in ([], [Masks()])
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


class Counts(UploadTransform):
    """An upload transform that counts the rounds at the server, and the uploads at each client."""

    stage = Stage.COUNT
    keeps_state = True

    def __init__(self):
        self._rounds = self._before = 0

    def setup(self, setting):
        self._before = self._rounds

    def encode(self, uploads):
        before = [kept.get("counts", {"n": torch.tensor(0)}) for kept in uploads.kept]
        uploads.memories["counts"] = [{"n": memory["n"] + 1} for memory in before]

    def on_aggregate(self, previous_state, aggregate):
        self._rounds += 1

    def roll_back_round(self):
        self._rounds = self._before

    def state_dict(self):
        return {"rounds": self._rounds}

    def load_state_dict(self, state):
        self._rounds = state["rounds"]


def test_transform_client_state_is_saved_only_if_upload_accepted():
    server, _ = server_of([Counts()])
    states = uploads_of(server, 2)
    states["weight"][1, 0, 0] = torch.nan
    assert server.upload(client_rounds("ab"), states) == [True, False]
    server.save_client_state("a", {name: value[0] for name, value in states.items()}, {})
    assert int(server.client_store["a"]["counts"]["n"]) == 1 and "counts" not in server.client_store["b"]


@pytest.mark.seconds
def test_transform_state_is_restored_from_checkpoint(fit, make_stream, make_task, tmp_path):
    whole = Counts()
    run(fit, make_stream, make_task, upload_transforms=[whole])
    options = {"trainer_args": {"enable_checkpointing": True}, "max_epochs": 2}
    run(fit, make_stream, make_task, [ModelCheckpoint(tmp_path, "last")], upload_transforms=[Counts()], **options)
    resumed = Counts()
    path = tmp_path / "last.ckpt"
    _, _, trainer = run(fit, make_stream, make_task, upload_transforms=[resumed], ckpt_path=path)
    assert resumed.state_dict() == whole.state_dict() == {"rounds": 4}
    store = trainer.strategy.server.client_store
    assert {client: int(store[client]["counts"]["n"]) for client in "0123"} == dict.fromkeys("0123", 4)
    with raises(InvalidValueError, "upload_transforms", code="other-recipe"):
        run(fit, make_stream, make_task, ckpt_path=path)


@pytest.mark.seconds
def test_transform_state_is_rolled_back_after_interrupted_round(fit, make_stream, make_task):
    counts = Counts()

    class Fails(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            assert trainer.current_epoch < 1

        def on_client_end(self, trainer, pl_module, client_round):
            if client_round.round_idx == 1:
                raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        run(fit, make_stream, make_task, [Fails()], upload_transforms=[counts])
    assert counts.state_dict() == {"rounds": 1}


# Tests of packed values and of received uploads.

REDUCTIONS = [
    *(BUILT_IN_REDUCTIONS[name] for name in ("mean", "sum", "sparse_mean", "median")),
    ConcatNonzeroRows(),
    SparseSum(),
    ConcatRows(4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(40, 7), (1, 1), (3, 0)])
def test_unpack_restores_packed_value(shape, share, dtype):
    value = (torch.rand(shape) < share) * torch.randn(shape).mul(3).to(dtype)
    value = value.to(dtype)
    for reduction in REDUCTIONS:
        packed = reduction.pack(value)
        found = reduction.unpack(packed, torch.empty_like(value))
        # Rows of zeros are not packed. After unpacking, the rows of zeros come last.
        if isinstance(reduction, ConcatNonzeroRows):
            assert torch.equal(found[: len(packed)], packed) and not found[len(packed) :].any()
        else:
            assert torch.equal(found, value)
        assert found.dtype == dtype and found.shape == value.shape
        assert packed.nbytes == reduction.upload_nbytes(value) <= value.nbytes


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1], lambda t: torch.cat([t, t[:1]]), lambda t: t ^ 255, lambda t: t[:3]]
)
def test_unpack_nonzero_damaged_value_raises(change):
    value = torch.zeros(61)
    value[::7] = 1.5
    with pytest.raises(InvalidValueError, match=r"Expected the nonzero elements of a tensor of torch\.float32"):
        unpack_nonzero(change(pack_nonzero(value)), value)


@pytest.mark.parametrize("bits", range(2, 17))
def test_pack_integers_uses_given_number_of_bits(bits):
    values = torch.from_numpy(np.random.default_rng(bits).integers(0, 2**bits, (3, 37)).astype(np.int32))
    packed = pack_integers(values, bits)
    assert packed.shape == (3, -(-37 * bits // 8)) and torch.equal(unpack_integers(packed, 37, bits), values)


@pytest.mark.parametrize("transforms", [[], [TopK(0.3)], [Quantize(3)], [Updates()], [TopK(0.2, bits=5), Clip(0.1)]])
def test_server_decodes_upload_of_node_as_in_simulation(transforms):
    extra = {"M.rows": (torch.zeros(4, 2), ConcatNonzeroRows()), "M.some": (torch.zeros(5), SparseSum())}
    simulated, _ = server_of(transforms, extra)
    states = uploads_of(simulated, 1)
    states["M.some"] = torch.zeros(1, 5)
    parts = ClientRounds.from_rounds(client_rounds("a"))
    client, server = (server_of(transforms, extra)[0] for _ in range(2))
    sent, _, _, _ = client.encode(parts, states)
    tensors = sent.client_tensors(0)
    arrived = server.received(parts, tensors)
    server.decode(arrived)
    assert server.accept(arrived) == [True] == simulated.upload(parts, states)
    assert simulated.record.upload_bytes == {"a": sum(value.nbytes for value in tensors.values())}
    first, second = simulated.aggregate(), server.aggregate()
    assert first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
    with raises(InvalidValueError, "more"):
        client.received(parts, {**tensors, "more": torch.zeros(1)})
    with pytest.raises(InvalidValueError, match=r"Expected `bias.*` in an upload, but it is missing"):
        client.received(parts, {name: value for name, value in tensors.items() if not name.startswith("bias")})


def test_mask_with_messages_of_methods_raises():
    server, module = server_of([Masks()])
    server.senders = ["FedWEIT"]
    with raises(InvalidValueError, "callbacks"):
        server.start_round(module)
    assert FedWEIT.message is not Replay.message


def test_strategy_invalid_transforms_raise():
    FederatedStrategy(compression=TopK(0.1), upload_transforms=[Clip(1.0), AddsToSums(1.0, 1), Probe(), Probe()])
    with raises(InvalidValueError, "upload_transforms"):
        FederatedStrategy(upload_transforms=[Probe(), Clip(1.0)])
    with raises(InvalidValueError, "upload_transforms"):
        FederatedStrategy(upload_transforms=[Clip(1.0), Clip(2.0)])
    with raises(InvalidValueError, "compression"):
        FederatedStrategy(compression=TopK(0.1), upload_transforms=[Masks()])
    assert Mean().averages and not BUILT_IN_REDUCTIONS["median"].averages


@pytest.mark.parametrize("transforms", [[], [TopK(0.3)], [Updates()]])
def test_accept_drops_non_finite_upload_of_node(transforms):
    """The server checks received uploads, because a client can send any values."""
    extra = {"M.mask": (torch.tensor([0.0, -torch.inf]), "mean")}
    server, client = (server_of(transforms, extra)[0] for _ in range(2))
    for name, fine in (("a", True), ("b", False)):
        parts, states = ClientRounds.from_rounds(client_rounds(name)), uploads_of(server, 1)
        states["M.mask"] = server.state["M.mask"][None].clone()
        sent, _, _, _ = client.encode(parts, states)
        tensors = sent.client_tensors(0)
        if not fine:
            tensors = {
                n: v.fill_(torch.nan) if n.startswith("weight") and v.is_floating_point() else v
                for n, v in tensors.items()
            }
        arrived = server.received(parts, tensors)
        server.decode(arrived)
        assert server.accept(arrived) == [fine]
    assert list(server.record.dropped) == ["b"] and server.record.accepted == ["a"]
    assert server.aggregate()["M.mask"].tolist() == [0.0, -torch.inf]
