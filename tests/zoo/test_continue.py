"""Tests that continue the training of published networks."""

import copy
from collections import Counter

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import yaml
from raising import raises
from sklearn.datasets import load_digits

from lightning_fcl import FederatedStream, RidgeClassifier, zoo
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.runs.loaded_recipe import load_newest_checkpoint
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.zoo import verifying as recipes
from lightning_fcl.zoo.continuation import read_continuation
from lightning_fcl.zoo.loading import read_tensors
from lightning_fcl.zoo.model_entry import CONTINUE, WEIGHTS
from lightning_fcl.zoo.publishing import publish

KEEPS_NOTHING = {"trainer": {"callbacks": []}}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}}
SILENT = {"trainer": {"enable_progress_bar": False}}
FEDCLIP = ("base", "wesad", "fedip-wesad", "fedclip-wesad", "replay", "scale-smoke")
ODFCL = ("base", "latent-replay", "scale-smoke")
FEDVIT = ("base", "fedvit", "scale-smoke")


@pytest.fixture
def small(small_recipe):
    return small_recipe(rounds=4, clients=4, rounds_per_experience=2)


@pytest.fixture
def fit(fit_small):
    """Return a function that fits a recipe of the package, with changes to the recipe, for a number of rounds."""

    def run(folder, rounds, *changes, **recipes):
        return fit_small(folder, *changes, words=["--trainer.max_epochs", str(rounds)], **recipes)

    return run


@pytest.fixture
def as_packaged(monkeypatch, tmp_path):
    """Return a function that registers the recipe of a run as a recipe of the package."""

    def make(run, rounds):
        monkeypatch.setattr("lightning_fcl.zoo.verifying.recipes_folder", lambda: run.parent)
        # Lightning writes the number of rounds of this fit to the config. The whole recipe has more rounds.
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["trainer"]["max_epochs"] = rounds
        (run.parent / "recipe.yaml").write_text(yaml.safe_dump(config))
        packaged = Recipe((run.parent / "recipe.yaml",))
        monkeypatch.setattr("lightning_fcl.zoo.verifying._candidates", lambda told: [packaged])
        return recipes._recipe_mark(packaged)

    return make


@pytest.fixture
def published(tmp_path, monkeypatch, as_packaged, fit, small):
    """Return a function that publishes a network after some rounds, and also fits the same recipe for all rounds.

    The function returns the published folder, the folder of the published run, and the state after all rounds.
    """

    def make(change, rounds, of=4, **recipes):
        monkeypatch.setenv("LIGHTNING_FCL_ZOO", str(tmp_path / "zoo"))
        # Recipes write their cache to the current folder.
        monkeypatch.chdir(tmp_path)
        changes = (SILENT, change) if recipes else (small, change)
        run, whole = (
            fit(tmp_path / name, last, *changes, **recipes) for name, last in (("part", rounds), ("whole", of))
        )
        recipe = as_packaged(run, of)
        monkeypatch.setattr("lightning_fcl.zoo.publishing.packaged_recipe", lambda run, results: recipe)
        return publish(run, "mlp.part", tmp_path / "zoo"), run, load_newest_checkpoint(whole)["state_dict"]

    return make


def same(module, state):
    found = module.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("more", "rounds"), [({}, 1), ({}, 2), ({}, 3), ({"strategy": {"init_args": {"server_optimizer": ADAM}}}, 2)]
)
def test_continue_without_client_state_is_bitwise_identical(published, more, rounds):
    """A continued training also restores the state of the server's optimizer."""
    _, _, whole = published({"trainer": {**KEEPS_NOTHING["trainer"], **more}}, rounds)
    later = zoo.continue_from("mlp.part")
    assert later.round == rounds and later.trainer.max_epochs == 4
    later.fit()
    assert same(later.module, whole)


def check_going_on(run, whole, rounds):
    """Check that a continued training gives the model ``whole`` with client states, and another model without them."""
    later = zoo.continue_from("mlp.part", clients=next((run / "checkpoints").glob("*.ckpt")))
    assert later.round == rounds
    later.fit()
    assert same(later.module, whole)
    alone = zoo.continue_from("mlp.part")
    alone.fit()
    assert not same(alone.module, whole)


@pytest.mark.seconds
def test_continue_with_client_states_is_bitwise_identical(published):
    # Each client has a teacher of FLwF-2T and a replay buffer. Round 3 is in the middle of an experience.
    _, run, whole = published({}, 3)
    check_going_on(run, whole, 3)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("paper", "names", "rounds", "of"),
    [
        # The network is published in the second experience, after intrinsic plasticity and before the readout.
        pytest.param("fedclip", FEDCLIP, 3, 8, marks=pytest.mark.long),
        # The network is published in the middle of the first session. Replay buffers contain feature maps of this
        # session and of the base session.
        pytest.param("odfcl", ODFCL, 1, 4, marks=pytest.mark.long),
        # The network is published in the middle of the second task. Clients have heads and client states of the first
        # task.
        ("fedvit", FEDVIT, 3, 4),
    ],
)
def test_continue_paper_recipe_with_client_states_is_bitwise_identical(
    data_folder, published, paper, names, rounds, of
):
    _, run, whole = published({}, rounds, of, recipes=[f"{paper}/{name}.yaml" for name in names])
    check_going_on(run, whole, rounds)


@pytest.mark.seconds
def test_publish_contains_no_client_state(published, tensors_of):
    folder, run, _ = published({}, 3)
    kept = next(value for value in load_newest_checkpoint(run)["callbacks"].values() if "clients" in value)["clients"]
    content = read_continuation(folder / CONTINUE)
    assert next(value for value in content["callbacks"].values() if "clients" in value)["clients"] == {}
    public = [value.flatten().double() for value in tensors_of(content) if value.is_floating_point()]
    numbers = torch.cat(public)
    rows = [
        [tuple(row) for value in tensors_of(client) if value.dim() > 1 for row in value.flatten(1).double().tolist()]
        for client in kept.values()
    ]
    holders = Counter(row for own in rows for row in set(own))
    single = [row for row, clients in holders.items() if clients == 1 and len(set(row)) > 3]
    # Each of these rows occurs in the client state of only one client, for example in a teacher or replay sample.
    assert len(single) > 50
    for row in single:
        assert not (numbers.unfold(0, len(row), 1) == torch.tensor(row, dtype=torch.float64)).all(dim=1).any()


@pytest.mark.seconds
def test_continue_checkpoint_of_other_run_raises(published, fit, small, tmp_path):
    published(KEEPS_NOTHING, 1)
    other = fit(tmp_path / "other", 1, small, {**KEEPS_NOTHING, "seed_everything": 5})
    with pytest.raises(
        ValueError, match="Expected `clients` to be a checkpoint of the published recipe, seed and data"
    ):
        zoo.continue_from("mlp.part", clients=next((other / "checkpoints").glob("*.ckpt")))


LITE0 = [f"frozen-lite0/{name}.yaml" for name in ("base", "scale-smoke")]
FOUR = {"data": {"partition": {"class_path": "IID", "init_args": {"num_clients": 4}}}}


@pytest.mark.seconds
def test_continue_readout_of_packaged_backbone_is_bitwise_identical(published):
    # After 3 rounds, the model has trained on 6 of 10 digits.
    folder, run, whole = published(FOUR, 3, 5, recipes=LITE0)
    readout = {f"readout.{name}" for name in ("A", "B", "n", "tag", "weight")}
    assert read_tensors(folder / WEIGHTS).keys() == {"weight"}
    assert (
        read_continuation(folder / CONTINUE)["state_dict"].keys()
        == readout
        < load_newest_checkpoint(run)["state_dict"].keys()
    )
    later = zoo.continue_from("mlp.part")
    assert int(later.module.readout.A.any(dim=1).sum()) == 6
    later.fit()
    assert same(later.module, whole)
    x, _ = later.stream.get_samples(later.stream.plan.test[:5])
    assert torch.equal(zoo.load("mlp.part").network.embed(x), later.module.embed(x))


@pytest.mark.seconds
def test_continue_new_classes_equal_joint_solution(published):
    published({**FOUR, "model": {"init_args": {"num_classes": 10}}}, 5, 5, recipes=LITE0)
    later = zoo.continue_from("mlp.part", classes=2)
    task, digits = later.module, load_digits()
    negatives = digits.images[digits.target < 2, None].astype(np.float32) / 16
    x, y = 1 - negatives, 10 + digits.target[digits.target < 2]
    stream = FederatedStream.from_arrays(
        x,
        y,
        client_ids=np.arange(len(y)) % 5,
        scenario=ClassIncremental(1),
        backbone=later.stream.backbone,
        classes=[f"{number}" for number in range(12)],
    )
    before = copy.deepcopy(task.readout)
    fit = L.Trainer(strategy="federated", max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu").fit
    fit(task, datamodule=stream)
    at_once = RidgeClassifier(task.model, num_classes=12, beta=10.0)
    for part, rounds in ((later.stream, later.stream.plan.train), (stream, stream.plan.train)):
        at_once.add_samples(
            *part.get_samples(np.concatenate([rows for clients in rounds for rows in clients.values()]))
        )
    at_once.readout.solve()
    assert int(task.readout.n) == int(at_once.readout.n)
    for name in ("A", "B", "weight"):
        found, wanted = getattr(task.readout, name), getattr(at_once.readout, name)
        assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()
    assert not before.weight[10:].any() and torch.equal(before.A[:10], task.readout.A[:10])


@pytest.mark.parametrize(
    ("name", "classes", "value"),
    [
        (
            "mlp.digits.flwf2t_replay",
            2,
            2,
        ),
        ("esn.wesad_wrist.incfed", 0, 0),
    ],
)
def test_continue_unsupported_classes_raise(name, classes, value):
    with raises(InvalidValueError, "classes", value=value):
        zoo.continue_from(name, classes=classes)


@pytest.mark.seconds
def test_continue_damaged_file_raises(published):
    folder, _, _ = published(KEEPS_NOTHING, 1)
    data = bytearray((folder / CONTINUE).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / CONTINUE).write_bytes(data)
    with raises(InvalidValueError, value=folder / CONTINUE):
        zoo.continue_from("mlp.part")
