"""Tests of the files that `lightning-fcl deploy` writes, and of the commands of docs/deploy.md."""

import json
import re
import shlex
import tomllib
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import yaml

import lightning_fcl
from lightning_fcl import FederatedStream
from lightning_fcl.cli.main import main
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental
from lightning_fcl.deployment.messages import RejectedMessageError
from lightning_fcl.deployment.node_data import read_data, set_node_data, write_split
from lightning_fcl.deployment.node_recipe import (
    ClientOutline,
    build_node_recipe,
    client_plan,
    make_outline,
    read_recipe,
    recipe_fingerprint,
    server_plan,
)
from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.runs.loaded_recipe import load_recipe
from lightning_fcl.runs.recipe import Recipe

from .recipes import method

ROOT = Path(lightning_fcl.__file__).parents[1]
PAGE = ROOT / "docs" / "deploy.md"


@pytest.mark.seconds
def test_deploy_flower_writes_app_and_recipe_with_defaults(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["deploy", "flower", "quickstart", "--out", "app", "--trainer.max_epochs", "3"])
    files = {path.name: path.read_text() for path in (tmp_path / "app").iterdir()}
    assert sorted(files) == ["client_app.py", "pyproject.toml", "recipe.yaml", "server_app.py"]
    assert sorted(capsys.readouterr().out.split()) == sorted(f"app/{name}" for name in files)
    for side in ("client", "server"):
        lines = [line for line in files[f"{side}_app.py"].splitlines() if line and not line.startswith('"""')]
        assert len(lines) == 3
        exec(compile(files[f"{side}_app.py"], "app", "exec"), {"__file__": str(tmp_path / "app" / "x.py")})
    project = tomllib.loads(files["pyproject.toml"])
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "server_app:app",
        "clientapp": "client_app:app",
    }
    assert project["project"]["dependencies"] == [f"lightning-fcl[flower]=={lightning_fcl.__version__}"]
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert recipe["trainer"]["max_epochs"] == 3
    assert recipe_fingerprint(recipe) in files["pyproject.toml"]


@pytest.mark.seconds
def test_build_node_recipe_equals_parsed_recipe(rehearsal):
    """The weights, methods and settings are identical for the same seed of the recipe."""
    one = rehearsal({"trainer": {"callbacks": [method("FLwF2T")]}})
    L.seed_everything(3)
    parsed, made = load_recipe(Recipe((one.path,))), build_node_recipe(one.recipe)
    start = state_tensors(made.module)
    assert all(torch.equal(value, start[name]) for name, value in state_tensors(parsed.model).items())
    assert [type(callback).__name__ for callback in made.callbacks] == ["FLwF2T"]
    assert made.callbacks[0].fingerprint() == parsed.callbacks[0].fingerprint()
    assert made.stream.batch_size == parsed.datamodule.batch_size
    assert made.strategy.settings.local_epochs == parsed.strategy.settings.local_epochs


def test_client_plan_from_outline_equals_simulation(tmp_path):
    """The scenarios assign classes or domains to rounds. The data files of the clients contain no round numbers."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(240, 3)).astype(np.float32), np.array(["b", "a", "d", "c"])[np.arange(240) % 4]
    group = np.array(["north", "south", "east"])[np.arange(240) % 3]
    owner = rng.integers(0, 3, 240)
    scenarios = (
        ClassIncremental(2, rounds_per_experience=2),
        ClassIncremental([1, 3], class_order=["d", "a", "b", "c"], history="seen"),
        DomainIncremental(domain_order=["south", "east", "north"]),
        ClassIncremental(2, order_per_client=True),
    )
    for number, scenario in enumerate(scenarios):
        stream = FederatedStream.from_arrays(x, y, owner, group, scenario=scenario, seed=5)
        write_split(stream, tmp_path / str(number))
        data = read_data(tmp_path / str(number) / "server.npz", for_server=True)
        told = server_plan(scenario, data.samples, data.split_names, stream.plan.clients, 5)
        assert told.tasks == stream.plan.tasks and told.experiences == stream.plan.experiences
        assert np.array_equal(np.sort(told.groups[told.test]), np.sort(stream.plan.groups[stream.plan.test]))
        for client in stream.plan.clients:
            outline = ClientOutline.from_dict(json.loads(json.dumps(asdict(make_outline(stream, client)))))
            own = np.unique(np.concatenate([current.get(client, []) for current in stream.plan.train])).astype(int)
            plan = client_plan(outline, stream.plan.groups[own], None, 5)
            for here, there in zip(plan.train, stream.plan.train, strict=True):
                assert np.array_equal(own[here.get(client, [])], there.get(client, []))
            assert [plan.class_split(round_idx) for round_idx in range(plan.num_rounds)] == [
                stream.plan.class_split(round_idx) for round_idx in range(plan.num_rounds)
            ]


def test_read_data_image_folder_and_data_module(tmp_path, monkeypatch):
    from PIL import Image

    for name, grey in (("cat", 0), ("dog", 255)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), (grey,) * 3).save(tmp_path / "photos" / name / f"{number}.png")
    photos = read_data(tmp_path / "photos").samples
    assert photos.classes == ("cat", "dog") and photos.x.shape == (6, 3, 8, 8)
    assert photos.x[photos.targets == 1].min() == 1
    code = """
import lightning.pytorch as L, torch
from torch.utils.data import DataLoader, TensorDataset
class Sensors(L.LightningDataModule):
    def prepare_data(self):
        self.x = torch.arange(12.0).view(6, 2)
    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x, torch.arange(6) % 3), batch_size=2)
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] / 255, batch[1]]
"""
    (tmp_path / "my_sensors.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    data, stream = read_data("my_sensors:Sensors"), FederatedStream(batch_size=3)
    assert data.samples.classes == ("0", "1", "2")
    names, tasks = ("0", "1", "2"), ((0, 1, 2),)
    set_node_data(stream, data, ClientOutline("a", names, names, True, (0,), tasks, (), (), ((0, 1, 2),), ((),)))
    batch = stream.on_after_batch_transfer([torch.ones(2, 2), torch.zeros(2)], 0)
    assert torch.equal(batch[0], torch.ones(2, 2) / 255) and stream.batch_size == 3
    # On the server, each round has one empty batch. The hook returns this batch unchanged.
    empty = [torch.empty(0), torch.empty(0)]
    assert stream.on_after_batch_transfer(empty, 0) is empty
    with pytest.raises(ValueError, match="as files, but `Sensors` overrides `on_after_batch_transfer`"):
        write_split(FederatedStream(data.module, ClassIncremental(3)), tmp_path / "shares")


def test_read_recipe_not_deployed_raises(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {}")
    with pytest.raises(ValueError, match="that `lightning-fcl deploy flower` has written"):
        read_recipe(tmp_path / "recipe.yaml")


def test_client_plan_wrong_number_of_rounds_raises():
    outline = ClientOutline("a", ("x",), ("x",), True, (0, 0), ((0,),), (), (), ((0,), ()), ((), ()))
    with pytest.raises(RejectedMessageError, match=r"number of rounds: 2\), but the number of columns is 3"):
        client_plan(outline, np.zeros(4, int), np.ones((4, 3), bool), 0)


def test_deploy_page_commands_are_tested():
    """Except for `pip`, the tests use each program and each option of the commands on the page."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL))
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    for line in filter(None, blocks.splitlines()):
        program, *words = shlex.split(line)
        options = [word for word in words if word.startswith("--")]
        assert program == "pip" or (f'"{program}"' in tested or program == "flwr"), program
        missing = [option for option in options if program != "pip" and f'"{option}"' not in tested]
        assert missing == [], line
