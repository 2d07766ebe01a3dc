"""What all methods share in a plain Trainer."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fcl.callbacks import AGEM, EWC, GEM, MAS, FedProx, FLwF2T, LwF, Replay
from lightning_fcl.callbacks.method import Method

METHODS = {
    "FLwF2T": lambda: [FLwF2T(0.4, 0.3)],
    "LwF": lambda: [LwF(2.0)],
    "EWC": lambda: [EWC(5.0)],
    "MAS": lambda: [MAS(0.5)],
    "Replay": lambda: [Replay(6, "class-balanced", "round")],
    "GEM": lambda: [GEM(6)],
    "A-GEM": lambda: [AGEM(0.3)],
    "all": lambda: [FLwF2T(0.4, 0.3), LwF(2.0), FedProx(0.1), Replay(6, "reservoir", "round"), GEM(0.3)],
}


@pytest.mark.parametrize("methods", METHODS)
def test_resumed_is_uninterrupted(make_task, samples, train, assert_same, tmp_path, methods):
    first, second = samples([0, 2]), samples([1, 3], seed=1)
    whole, again, callbacks = make_task(), make_task(seed=9), METHODS[methods]()
    train(whole, callbacks, first)
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    train(whole, [*callbacks, saving], second, epochs=4, enable_checkpointing=True)
    resumed = METHODS[methods]()
    train(again, resumed, second, epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_same(again, whole, 0)
    train(whole, callbacks, first)  # a third experience
    train(again, resumed, first)
    assert_same(again, whole, 0)


def test_checkpoints_hold_no_pickled_objects(make_task, samples, train, tmp_path):
    callbacks = METHODS["all"]()
    train(make_task(), [*callbacks, ModelCheckpoint(tmp_path, "{epoch}")], samples(), enable_checkpointing=True)
    kept = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["callbacks"]
    assert torch.equal(kept["Replay"]["memory"]["x"], callbacks[3].memory["x"])


def test_an_epoch_of_a_stream_is_a_round(fit, make_stream, make_task):
    class Turns(Method):
        def begin(self, memory, server, turn):
            turns.append(("begin", turn.round, turn.experience, turn.last_round))
            return memory

        def finish(self, memory, own, data, turn, generator):
            turns.append(("end", turn.round, turn.experience, turn.last_round))
            return memory

    expected = [(r, r // 2, r % 2 == 1) for r in range(4)]
    for strategy in (None, "auto"):
        turns = []
        fit(make_task(), make_stream(clients=1, rounds_per_experience=2), [Turns()], strategy=strategy)
        assert turns == [(when, *turn) for turn in expected for when in ("begin", "end")]
