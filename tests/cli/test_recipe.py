"""A recipe is one dictionary, which equals what jsonargparse makes of the same files and words."""

import shlex

import pytest
import yaml

from lightning_fcl import FederatedCLI
from lightning_fcl.running.fit import resolve_recipe
from lightning_fcl.running.recipe import Recipe
from lightning_fcl.running.rows import recipes_folder

QUICKSTART = recipes_folder() / "quickstart.yaml"
FILES = {
    "same.yaml": "trainer: {callbacks: [FLwF2T, {class_path: Replay, init_args: {update: round}}]}",
    "other.yaml": "trainer: {callbacks: [{class_path: FedProx}, {class_path: EWC, init_args: {strength: 3}}]}\n"
    "data: {partition: {class_path: Dirichlet, init_args: {alpha: 0.3}}, scenario: DomainIncremental}",
    "plus.yaml": "trainer: {callbacks+: [{class_path: lightning_fcl.callbacks.FedProx}]}",
    "adam.yaml": "model: {init_args: {optimizer: {class_path: torch.optim.Adam}}}",
    "short.yaml": "data: {partition: {clients: 7}, scenario: {experiences: 2}}\n"
    "model: {init_args: {optimizer: {lr: 0.3}}}",
    "net.yaml": "{class_path: lightning_fcl.Classifier, init_args: {num_classes: 10, model: {class_path: "
    "lightning_fcl.models.MLP, init_args: {sizes: [64, 10]}}}}",
    "part.yaml": "model: net.yaml",
    "dotted.yaml": "trainer.max_epochs: 4",
}
SAME = [
    *(f"--config {name}" for name in FILES if name != "net.yaml"),
    "--trainer.max_epochs 3 --config adam.yaml --model.optimizer.lr 0.7 --config short.yaml",
    "--data.partition Dirichlet --data.partition.alpha .5",
    "--data.partition.clients 3 --data.partition.init_args.clients=4",
    "--model.optimizer Adam --model.optimizer.betas [0.8,0.9]",
    "--model.init_args.optimizer.init_args.lr 1e-3",
    "--trainer.callbacks [] --trainer.callbacks+ Replay",
    "--trainer.callbacks+=FedProx --trainer.callbacks.mu .3",
    "--trainer.callbacks.max_size 7",
    "--trainer.callbacks '[{class_path: Replay}]' --trainer.callbacks.max_size 9",
    "--trainer.strategy.participation 0.5",
    "--trainer.strategy auto",
    "--trainer.strategy.compression TopK --trainer.strategy.compression.fraction .1",
    "--trainer.strategy.server_optimizer SGD --trainer.strategy.server_optimizer.lr 1.0",
    "--data.scenario null --data.data '{name: digits}'",
    "--data '{batch_size: 3}' --trainer '{max_epochs: 2}'",
    "--recipe.row 3 --out 12 --seed_everything false",
    "--recipe.row 'a: b' --recipe.expected '{final_accuracy/server: 0.5}'",
    "--data.split.test 0.3 --data.split.train_clients [a,b]",
    "--trainer.logger CSVLogger --trainer.logger.save_dir 'a folder'",
    "--model lightning_fcl.RidgeClassifier",
    "--trainer.precision 64 --trainer.max_time '{hours: 1}' --trainer.limit_train_batches .5",
]


class Parsed(FederatedCLI):
    """Parses words, as a project's own command line does, and makes nothing."""

    def before_instantiate_classes(self):
        config = self.config["fit"].clone()
        config.pop("config")
        self.text = self._parser("fit").dump(config, skip_validation=True, skip_unset=False)

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.seconds
@pytest.mark.parametrize("line", SAME)
def test_a_recipe_equals_its_words(line):
    words = ["--config", str(QUICKSTART), *shlex.split(line)]
    parsed = Parsed(args=["fit", *words], trainer_defaults=None)
    assert resolve_recipe(Recipe.of_words(words)) == yaml.safe_load(parsed.text)
