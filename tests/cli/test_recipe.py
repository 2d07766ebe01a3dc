"""Tests that merging recipes gives the same result as jsonargparse for the same files and arguments."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_fcl import FederatedCLI
from lightning_fcl.cli import fit as fit_command
from lightning_fcl.cli.main import main
from lightning_fcl.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingFileError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.runs.fit import make_cli, resolve_recipe
from lightning_fcl.runs.merging import merge
from lightning_fcl.runs.paper_rows import Row, recipes_folder
from lightning_fcl.runs.recipe import Recipe, Setting, take_settings

QUICKSTART = recipes_folder() / "quickstart.yaml"
FILES = {
    "same.yaml": "trainer: {callbacks: [FLwF2T, {class_path: Replay, init_args: {update: round}}]}",
    "other.yaml": "trainer: {callbacks: [{class_path: FedProx}, {class_path: EWC, init_args: {strength: 3}}]}\n"
    "data: {partition: {class_path: Dirichlet, init_args: {alpha: 0.3}}, scenario: DomainIncremental}",
    "plus.yaml": "trainer: {callbacks+: [{class_path: lightning_fcl.callbacks.FedProx}]}",
    "adam.yaml": "model: {init_args: {optimizer: {class_path: torch.optim.Adam}}}",
    "short.yaml": "data: {partition: {num_clients: 7}, scenario: {num_experiences: 2}}\n"
    "model: {init_args: {optimizer: {lr: 0.3}}}",
    "net.yaml": "{class_path: lightning_fcl.Classifier, init_args: {num_classes: 10, model: {class_path: "
    "lightning_fcl.models.MLP, init_args: {sizes: [64, 10]}}}}",
    "part.yaml": "model: net.yaml",
    "dotted.yaml": "trainer.max_epochs: 4",
    "third_party.py": "from dataclasses import dataclass\nfrom lightning.pytorch import LightningModule\n"
    "@dataclass\nclass Limits:\n    low: int = 1\n    high: int = 2\n    inner: LightningModule | None = None\n"
    "class Net(LightningModule):\n"
    "    def __init__(self, limits: Limits = Limits(), others: Limits | None = None, words: dict | None = None,\n"
    "                 name: str = '', size: int = 1, inner: LightningModule | str | None = None,\n"
    "                 layers: list[LightningModule] | None = None):\n        super().__init__()\n"
    "class Derived(Net):\n    def __init__(self, **kwargs):\n        super().__init__(**kwargs)\n"
    "class Open(LightningModule):\n    def __init__(self, **kwargs):\n        super().__init__()\n",
    "limits.yaml": "model: {class_path: third_party.Net, init_args: {limits: {low: 5}, others: {low: 6}, "
    "words: {a: 1}}}",
    "more-limits.yaml": "model: {init_args: {limits: {high: 7}, others: {high: 8}, words: {b: 2}}}",
    "folder/files.yaml": "model: {class_path: third_party.Derived, init_args: {limits: deeper/limits.yaml, inner: "
    "deeper/first.yaml, name: files.yaml, layers: [deeper/first.yaml, third_party.Open]}}",
    "folder/deeper/limits.yaml": "{high: 9, inner: second.yaml}",
    "folder/deeper/first.yaml": "{class_path: third_party.Net, init_args: {size: 3, inner: second.yaml}}",
    "folder/deeper/second.yaml": "{class_path: third_party.Net, init_args: {size: 4}}",
    "folder/trainer.yaml": "trainer: deeper/trainer.yaml",
    "folder/deeper/trainer.yaml": "{max_epochs: 7, callbacks: {class_path: Replay, init_args: {memory_size: 3}}}",
}
NO_RECIPES = ("net.yaml", "more-limits.yaml", "third_party.py", "folder/deeper/")
SAME = [
    *(f"--config {name}" for name in FILES if not name.startswith(NO_RECIPES)),
    "--config limits.yaml --config more-limits.yaml",
    "--config limits.yaml --model.limits '{high: 7}' --model.others '{high: 8}' --model.words '{b: 2}'",
    "--config limits.yaml --model.others.high 3",
    "--config folder/files.yaml --model.limits.low 8 --model.inner.size 5",
    "--model third_party.Net --model.inner folder/deeper/first.yaml --model.inner.name x",
    "--model third_party.Open --model.dict_kwargs.a.b 3 --model.dict_kwargs.a.c 4",
    "--model third_party.Open --model.dict_kwargs '{a: {b: 3}}' --model.dict_kwargs.a.c 4 --model.dict_kwargs.d e",
    "--trainer.max_epochs 3 --config adam.yaml --model.optimizer.lr 0.7 --config short.yaml",
    "--data.partition Dirichlet --data.partition.alpha .5",
    "--data.partition.num_clients 3 --data.partition.init_args.num_clients=4",
    "--model.optimizer Adam --model.optimizer.betas [0.8,0.9]",
    "--model.init_args.optimizer.init_args.lr 1e-3",
    "--trainer.callbacks [] --trainer.callbacks+ Replay",
    "--trainer.callbacks+=FedProx --trainer.callbacks.mu .3",
    "--trainer.callbacks.memory_size 7",
    "--trainer.callbacks '[{class_path: Replay}]' --trainer.callbacks.memory_size 9",
    "--trainer.strategy.participation 0.5",
    "--trainer.strategy auto",
    "--trainer.strategy.compression TopK --trainer.strategy.compression.fraction .1",
    "--trainer.strategy.server_optimizer SGD --trainer.strategy.server_optimizer.lr 1.0",
    "--data.scenario null --data.data '{name: digits}'",
    "--data '{batch_size: 3}' --trainer '{max_epochs: 2}'",
    "--recipe.row 3 --out 12 --seed_everything false",
    "--recipe.row 'a: b' --recipe.expected_metrics '{final_accuracy/server: 0.5}'",
    "--data.split.test 0.3 --data.split.train_clients [a,b]",
    "--trainer.logger CSVLogger --trainer.logger.save_dir 'a folder'",
    "--model lightning_fcl.RidgeClassifier",
    "--trainer.precision 64 --trainer.max_time '{hours: 1}' --trainer.limit_train_batches .5",
]


class Parsed(FederatedCLI):
    """A subclass of the command line, as in a user's project. It parses its arguments, and does nothing else."""

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
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.seconds
@pytest.mark.parametrize("line", SAME)
def test_resolve_recipe_equals_parsed_words(line):
    words = ["--config", str(QUICKSTART), *shlex.split(line)]
    parsed = Parsed(args=["fit", *words], trainer_defaults=None)
    assert resolve_recipe(Recipe.from_words(words)) == yaml.safe_load(parsed.text)


@pytest.mark.parametrize(
    ("here", "more", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"d": 3}}),
        ({"a": 1, "b": {"c": 2}}, {"b.d": 3}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"data": {"b": 1, "split": {"c": 2}}}, {"data": {"split": {"d": 3}}},
         {"data": {"b": 1, "split": {"c": 2, "d": 3}}}),
        ({}, {"trainer": {"a+": [1]}}, {"trainer": {"a": [1]}}),
        ({}, {"a": {"class_path": "x.Y", "init_args": {"b+": 1}}},
         {"a": {"class_path": "x.Y", "init_args": {"b": [1]}}}),
        ({"data": {"a": {0: 1, 1: 2}}}, {"data": {"a": {1: 3}}}, {"data": {"a": {1: 3}}}),
        ({"data": {}}, {"data": {"a": {"b.*": "mean", "c+": 1}}}, {"data": {"a": {"b.*": "mean", "c+": 1}}}),
        ({"a": ["x"]}, {"a+": "null"}, {"a": ["x"]}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": [1]}, {"a+": 2}, {"a": [1, 2]}),
        ({}, {"a+": [2, 3]}, {"a": [2, 3]}),
        ({"b": {"a": [1]}}, {"b.a+": 2}, {"b": {"a": [1, 2]}}),
        ({"a": {"class_path": "x.Y", "dict_kwargs": {"b": {"c": 1}}}}, {"a.dict_kwargs.b.c": 2},
         {"a": {"class_path": "x.Y", "dict_kwargs": {"b": {"c": 1}, "b.c": 2}}}),
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"class_path": "x.Y", "init_args": {"b": 1}}}, {"a": {"c": 2}},
         {"a": {"class_path": "x.Y", "init_args": {"b": 1, "c": 2}}}),
        ({"a": {"class_path": "x.Y", "init_args": {"b": 1}}}, {"a": "none"}, {"a": "none"}),
        ({"a": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1, "momentum": 2}}}, {"a": "torch.optim.Adam"},
         {"a": {"class_path": "torch.optim.Adam", "init_args": {"lr": 1}}}),
        ({"a": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}}, {"a": {"class_path": "SGD"}},
         {"a": {"class_path": "SGD", "init_args": {"lr": 1}}}),
        ({"a": "torch.optim.SGD"}, {"a": {"lr": 1}}, {"a": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}}),
        ({"a": ["FedProx", "Replay"]}, {"a": {"FedProx": {"mu": 1}}},
         {"a": [{"class_path": "FedProx", "init_args": {"mu": 1}}, "Replay"]}),
    ],
)  # fmt: skip
def test_merge_overrides_values(here, more, expected):
    before = yaml.safe_dump([here, more])
    whole = dict(here)
    merge(whole, more)
    assert whole == expected
    whole = dict(here)
    merge(whole, more)
    assert yaml.safe_dump([here, more]) == before  # Merging does not change its inputs.


def test_merge_unknown_list_entry_raises():
    with pytest.raises(UnknownNameError) as raised:
        merge({"callbacks": ["FedProx", "Replay"]}, {"callbacks": {"Replai": {"memory_size": 1}}})
    assert raised.value.hint == "Did you mean Replay?"
    assert "in the list `callbacks`, but the list contains FedProx, Replay." in str(raised.value)
    with pytest.raises(UnknownNameError):  # Two entries have this name.
        merge({"callbacks": ["Replay", "Replay"]}, {"callbacks": {"Replay": {"memory_size": 1}}})


@pytest.mark.parametrize("name", ["memory_size", "Replay.memory_size"])
def test_merge_entry_of_empty_list_raises(name):
    with pytest.raises(UnknownNameError, match="in `callbacks`, but the list is empty"):
        merge({"callbacks": []}, {f"callbacks.{name}": 1})


def test_merge_misspelled_class_key_raises_with_hint():
    for wrong, hint in (
        ("init_arg", "Did you mean init_args?"),
        ("lr", "Write it in `init_args`, as in init_args: {lr: ...}."),
    ):
        whole = {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}}
        with pytest.raises(UnknownNameError) as raised:
            merge(whole, {"optimizer": {"class_path": "torch.optim.SGD", wrong: {"lr": 5}}})
        assert raised.value.hint == hint


def test_merge_class_change_keeps_arguments_passed_to_base(monkeypatch, tmp_path):
    (tmp_path / "passing.py").write_text(
        "from lightning_fcl.models import MLP\n"
        "class Passing(MLP):\n    def __init__(self, extra: int = 3, **kwargs):\n        super().__init__(**kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    whole = {"model": {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": [64, 10]}}}
    merge(whole, {"model": "passing.Passing"})
    assert whole["model"] == {"class_path": "passing.Passing", "init_args": {"sizes": [64, 10]}}


def test_section_setting_names_a_file(tmp_path):
    (tmp_path / "trainer.yaml").write_text("max_epochs: 2")
    content = Recipe((QUICKSTART, Setting("trainer", str(tmp_path / "trainer.yaml")))).content()
    assert content["trainer"]["max_epochs"] == 2 and len(content["trainer"]["callbacks"]) == 2
    for name in ("subcommand", "config"):
        with pytest.raises(UnknownNameError):
            Recipe((QUICKSTART, Setting(name, "fit"))).content()
    assert Recipe((QUICKSTART, Setting("trainer", None))).content() == Recipe((QUICKSTART,)).content()


def net(size, inner=None):
    return {"class_path": "third_party.Net", "init_args": {"size": size} | ({"inner": inner} if inner else {})}


def test_file_names_are_relative_to_naming_file(monkeypatch, tmp_path):
    content = Recipe((Path("folder/files.yaml"), Path("folder/trainer.yaml"))).content()
    given = content["model"]["init_args"]
    assert given["limits"] == {"high": 9, "inner": net(4)}
    assert given["inner"] == given["layers"][0] == net(3, net(4))
    assert given["layers"][1] == "third_party.Open" and given["name"] == "files.yaml"
    assert content["trainer"]["max_epochs"] == 7
    chain = {"a.yaml": "model: folder/b.yaml", "folder/b.yaml": "deeper/c.yaml", "folder/deeper/c.yaml": "second.yaml"}
    for name, text in chain.items():  # The whole content of a file can be the name of another file.
        (tmp_path / name).write_text(text)
    assert Recipe((Path("a.yaml"),)).content() == {"model": net(4)}
    monkeypatch.chdir(tmp_path / "folder")
    assert Recipe((Path("../a.yaml"),)).content() == {"model": net(4)}
    plus = Setting("model.layers+", "deeper/first.yaml")
    given = Recipe((Path("files.yaml"), plus)).content()["model"]["init_args"]
    assert given["layers"] == [net(3, net(4)), "third_party.Open", net(3, net(4))]


def test_file_name_relative_to_working_directory_raises(tmp_path):
    (tmp_path / "folder" / "wrong.yaml").write_text(
        "{model: {class_path: third_party.Net, init_args: {inner: net.yaml}}}"
    )
    with pytest.raises(InvalidValueError) as raised:
        Recipe((Path("folder/wrong.yaml"),)).content()
    (tmp_path / "folder" / "wrong.yaml").write_text(
        f"{{model: {{class_path: third_party.Net, init_args: {{inner: {raised.value.hint.split()[1].rstrip(':')}}}}}}}"
    )
    inner = Recipe((Path("folder/wrong.yaml"),)).content()["model"]["init_args"]["inner"]
    assert inner == yaml.safe_load(FILES["net.yaml"])


@pytest.mark.parametrize(
    "texts", [["model: a.yaml"], ["model: b.yaml", net(1, "b.yaml")], ["model: b.yaml", net(1, "a.yaml")]]
)
def test_files_that_name_each_other_raise(texts, tmp_path):
    for name, content in zip(("a.yaml", "b.yaml"), texts, strict=False):
        (tmp_path / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(InvalidValueError, match=r"in a cycle, but got a\.yaml -> .*\.yaml"):
        Recipe((Path("a.yaml"),)).content()


def test_take_settings_splits_options_files_and_settings():
    words = ["quickstart", "--a.b", "-1", "--out", "x", "--config=f.yaml", "--c+=[1]", "more"]
    rest, layers = take_settings(words, ["--out"])
    assert rest == ["quickstart", "--out", "x", "more"]
    assert layers == [Setting("a.b", "-1"), Path("f.yaml"), Setting("c+", "[1]")]
    assert Recipe(tuple(layers)).words == ["--a.b", "-1", "--config", "f.yaml", "--c+", "[1]"]
    for wrong, option in ((["--a.b"], "--a.b"), (["--a.b", "--out"], "--a.b"), (["--config"], "--config")):
        with pytest.raises(MissingValueError) as raised:
            take_settings(wrong, ["--out"])
        assert raised.value.argument == option


def test_recipe_content_invalid_file_raises(tmp_path):
    (tmp_path / "list.yaml").write_text("[1]")
    for file, error in (("list.yaml", InvalidValueError), ("nothing.yaml", MissingFileError)):
        with pytest.raises(error):
            Recipe((tmp_path / file,)).content()


WRONG = [
    ("--modle.num_classes 3", UnknownNameError, "modle", "Did you mean model?"),
    ("--trainer.max_epoch 3", UnknownNameError, "trainer.max_epoch", "Did you mean trainer.max_epochs?"),
    ("--data.clents 3", UnknownNameError, "data.clents", "Did you mean data.partition.num_clients?"),
    ("--model.optimizer.lrr 3", UnknownNameError, "model.optimizer.lrr", "Did you mean lr?"),
    (
        "--trainer.callbacks.Replay.memory_sze 3",
        UnknownNameError,
        "trainer.callbacks.memory_sze",
        "Did you mean memory_size?",
    ),
    (
        "--model.optimizer.lr 1e-3x",
        InvalidTypeError,
        "model.optimizer.lr",
        "Leave it out (default of the class: 0.001).",
    ),
    ("--model lightning_fcl.Clasifier", UnknownNameError, "model", "Did you mean Classifier?"),
    ("--trainer.max_epochs many", InvalidTypeError, "trainer.max_epochs", "Leave it out."),
    ("--trainer.callbacks os.getcwd", InvalidTypeError, "trainer.callbacks", "Name a class in `class_path`."),
    ("--trainer.callbacks torch.optim.SGD", InvalidTypeError, "trainer.callbacks", ""),
    ("--trainer 3", InvalidTypeError, "trainer", ""),
    ("--seed_everything abc", InvalidTypeError, "seed_everything", "Pass True, False or a whole number."),
    (
        "--model.model lightning_fcl.create_model --model.model.nam x",
        UnknownNameError,
        "model.model.nam",
        "Did you mean name?",
    ),
    ("--model.optimizer.lr abc", InvalidTypeError, "model.optimizer.lr", "Leave it out (default of the class: 0.001)."),
    ("--model.model builtins.int", InvalidTypeError, "model.model", ""),
]  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize(("line", "kind", "argument", "hint"), WRONG)
def test_resolve_recipe_rejected_value_raises_class_and_hint(line, kind, argument, hint):
    with pytest.raises(kind) as raised:
        resolve_recipe(Recipe.from_words(["--config", str(QUICKSTART), *shlex.split(line)]))
    assert (raised.value.argument, raised.value.hint) == (argument, hint)


@pytest.mark.seconds
def test_recipe_without_model_raises():
    with pytest.raises(MissingValueError) as raised:
        make_cli({"trainer": {"max_epochs": 1}}, FederatedCLI, runs=False)
    assert raised.value.argument == "model"


@pytest.mark.seconds
def test_import_does_not_change_jsonargparse_yaml_loader():
    """The library adds a parser mode with limits, and does not change the YAML mode of jsonargparse."""
    code = "import jsonargparse; before = jsonargparse.get_loader('yaml'); import lightning_fcl.runs.fit\n"
    code += "assert jsonargparse.get_loader('yaml') is before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_fit_new_option_appears_in_help_and_completion(monkeypatch, capsys):
    plain, notes = fit_command.Fit.arguments, []

    def arguments(self, parser):
        plain(self, parser)
        parser.add_argument("--note", help="a note on the run")

    monkeypatch.setattr(fit_command.Fit, "arguments", arguments)
    monkeypatch.setattr(fit_command.Fit, "run", lambda self, options: notes.append((options.note, options.layers)))
    main(["fit", "quickstart", "--note", "a word", "--data.batch_size", "8"])
    assert notes == [("a word", [Setting("data.batch_size", "8")])]
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "a note on the run" in capsys.readouterr().out
    main(["completion", "bash"])
    assert "--note" in capsys.readouterr().out


def test_printed_commands_resolve_to_same_recipe(tmp_path):
    folder = tmp_path / "a folder's"
    words = Recipe((folder / "my recipe.yaml", Setting("recipe.row", "it's $HOME"))).words
    assert shlex.split(shlex.join(words)) == words


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("same.yaml", "--model.optimizer torch.optim.AdamW"),
        (
            "other.yaml",
            "--data.scenario '{class_path: ClassIncremental, init_args: {num_experiences: 5}}' --data.batch_size 8",
        ),
        ("adam.yaml", "--trainer.callbacks+ FedProx --trainer.callbacks.mu 1e-3"),
        ("short.yaml", "--recipe.row on --trainer.max_time 12:30:45:00 --trainer.strategy auto"),
        ("plus.yaml", "--trainer.callbacks+ '{class_path: EWC}' --data.split.train_clients [a,b]"),
        ("folder/files.yaml", "--model.limits '{low: 4}' --model.others.high 3 --model.dict_kwargs.a.b 3"),
    ],
)
def test_flatten_recipe_has_merged_values(file, line, tmp_path):
    settings = Recipe.from_words(shlex.split(line)).settings
    row = Row("a row", (QUICKSTART, Path(file)), settings=settings)
    (tmp_path / "copy.yaml").write_text(fit_command.flatten_recipe(row))
    wanted = resolve_recipe(row.recipe)
    assert resolve_recipe(Recipe((tmp_path / "copy.yaml",))) | {"out": wanted["out"]} == wanted


def test_flatten_recipe_keeps_comments_and_style(tmp_path):
    base = """# head
trainer:
  max_epochs: 1e1  # ten
  callbacks:
  # first
  - class_path: Replay
    init_args: {memory_size: 0x10}  # sixteen
"""
    more = """# another head
trainer:
  callbacks+:
  - class_path: FedProx  # second
data:
  split: {test: "0.5"}  # half
  'on': 1
"""
    for name, text in (("base.yaml", base), ("more.yaml", more)):
        (tmp_path / name).write_text(text)
    assert fit_command.flatten_recipe(Row("a row", (Path("base.yaml"), Path("more.yaml")))) == (
        "# head\n# another head\n"
        + base.removeprefix("# head\n")
        + more.removeprefix("# another head\ntrainer:\n  callbacks+:\n")
    )


def test_deploy_executor_forwards_arguments(monkeypatch):
    told = []
    monkeypatch.setattr("lightning_fcl.deployment.node.run_executor", told.append)
    main(["deploy", "executor", "--runtime-api-address", "127.0.0.1:1", "--insecure"])
    assert told == [["--runtime-api-address", "127.0.0.1:1", "--insecure"]]
