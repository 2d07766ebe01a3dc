"""Tests of messages about typing mistakes. Each message contains the argument, the value and the fix."""

import shlex

import pytest

import lightning_fcl
from lightning_fcl.cli.main import main

FILES = {
    "key.yaml": "trainer: {max_epoch: 3}",
    "section.yaml": "modle: {class_path: lightning_fcl.Classifier}",
    "callback.yaml": "trainer: {callbacks: [{class_path: lightning_fcl.callbacks.FedVit}]}",
    "path.yaml": "trainer: {callbacks: [{class_path: Replays}]}",
    "argument.yaml": "trainer: {callbacks: "
    "[{class_path: lightning_fcl.callbacks.Replay, init_args: {memory_sizes: 3}}]}",
    "task.yaml": "model: {class_path: lightning_fcl.Clasifier}",
    "function.yaml": "trainer: {callbacks: [{class_path: os.system, init_args: {command: 'touch called'}}]}",
    "data.yaml": "data: {batch_sise: 3}",
    "rate.yaml": "model: {init_args: {optimizer: {init_args: {lrr: 0.1}}}}",
    "module.yaml": "trainer: {callbacks: [{class_path: lightning_fc.callbacks.Replay}]}",
    "empty.yaml": "",
    "list.yaml": "- 1\n- 2",
    "nested.yaml": "data: "
    "{scenario: {class_path: Online, init_args: {scenario: {class_path: Blurry, init_args: {blurry_ratio: 1}}}}"
    "}",
    "tab.yaml": "trainer:\n\tmax_epochs: 3",
    "ambiguous.yaml": "model: {class_path: Classifier, init_args: {model: {class_path: MLP, init_args: {}}}}",
    "again.yaml": "trainer: {max_epochs: 3}\ntrainer: {max_epochs: 4}",
    "shorthand.yaml": "trainer: {callbacks: [lightning_fcl.callbacks.EWC: {strength: 3}]}",
    "early.yaml": "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: server/acuracy}}]}",
    "nan.yaml": "model: {init_args: {optimizer: {init_args: {lr: .nan}}}}",
    "best.yaml": "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {monitor: server/acuracy}}]}",
    "twice.yaml": "trainer: {callbacks: [{class_path: Replay}, {class_path: Replay}]}",
    "search.yaml": "configs: [empty.yaml]\nobjectiv: x",
}
# Arguments after `fit quickstart`, and a part of the expected message.
FIT = [
    ("key.yaml", "got `trainer.max_epoch`. Did you mean trainer.max_epochs?"),
    ("section.yaml", "got `modle`. Did you mean model?"),
    ("callback.yaml", "lightning_fcl.callbacks, but the module has no FedVit. Did you mean FedViT?"),
    (
        "path.yaml",
        "Expected `trainer.callbacks` to be a `Callback`, but got Replays. Did you mean Replay?",
    ),
    (
        "argument.yaml",
        "Expected an argument of lightning_fcl.callbacks.Replay, but got `memory_sizes`. Did you mean memory_size?",
    ),
    ("task.yaml", "Expected a class of lightning_fcl, but the module has no Clasifier. Did you mean Classifier?"),
    (
        "function.yaml",
        "Expected a class, but got os.system, which has the type builtin_function_or_method. Name a class",
    ),
    ("data.yaml", "got `data.batch_sise`. Did you mean data.batch_size?"),
    ("rate.yaml", "Expected an argument of torch.optim.SGD, but got `lrr`. Did you mean lr?"),
    ("module.yaml", "No module named 'lightning_fc'"),
    ("tab.yaml", "Expected tab.yaml to be YAML but got"),
    ("--data.clents 3", "got `data.clents`. Did you mean data.partition.num_clients?"),
    ("--data.partition.clents 3", "clients?"),
    ("--data.batchsize 3", "got `data.batchsize`. Did you mean data.batch_size?"),
    ("--trainer.accelerator gpus", "invalid accelerator name: `accelerator='gpus'`"),
    ("--trainer.strategy federatd", "invalid strategy name: `strategy='federatd'`. Did you mean federated?"),
    ("--trainer.strategy.participaton 1", "got `participaton`. Did you mean participation?"),
    (
        "--trainer.max_epochs many",
        'Expected `max_epochs` to be a whole number or None, but got "many".',
    ),
    (
        "--trainer.max_epochs",
        "Expected a value after `--trainer.max_epochs`, but got none. Write --trainer.max_epochs=VALUE.",
    ),
    ("--trainer.precision 17", "Expected `precision` to be 64, 32, 16,"),
    ("--data.data digit", "got 'digit'. Did you mean digits?"),
    ("--data.scenario ClassIncrementl", "Did you mean ClassIncremental?"),
    (
        "--data.batch_size 16.0",
        "Expected `batch_size` to be a whole number or None, but got 16.0. Use `batch_size=16`.",
    ),
    ("nan.yaml", "Expected `lr` of `SGD` to be a finite number, but got nan. Use a finite number, such as `lr=0.01`."),
    (
        "--trainer.strategy.local_epochs 2.0",
        "Expected `local_epochs` to be a whole number, but got 2.0. Use `local_epochs=2`.",
    ),
    ("--data.batch_size 0", "Expected `batch_size` to be at least 1 but got 0"),
    (
        "--model.optimizer torch.optim.SDG",
        "class of torch.optim, but the module has no SDG. Did you mean SGD?",
    ),
    ("--model.optimizer.lr -1", "Invalid learning rate: -1.0. Correct the arguments of"),
    ("--model.model lightning_fcl.models.MPL", "has no MPL. Did you mean MLP?"),
    ("--ckpt_path nothing.ckpt", "Expected a checkpoint at nothing.ckpt but there is none"),
    (
        "ambiguous.yaml",
        "Write the full name of one of them: lightning_fcl.models.small.MLP,",
    ),
    ("again.yaml", "Expected each key once but got `trainer` again in line 2. Remove one of the two keys."),
    ("shorthand.yaml", "Expected {class_path: lightning_fcl.callbacks.EWC, init_args: {...}}, but got {'lightning_fcl"),
    ("early.yaml", "a logged metric, but got server/acuracy. Did you mean server/accuracy?"),
    ("best.yaml", "a logged metric, but got server/acuracy. Did you mean server/accuracy?"),
    ("twice.yaml", "Expected each method once, but got `Replay` 2 times. Keep one `Replay`, and remove the others."),
    ("--model.model.sizes [63,10]", "Expected `model` to take samples of the data, of shape (1, 8, 8), but MLP raised"),
    ("--model.model.sizes 64", "Expected `sizes` to be a list of whole numbers, but got 64. Pass a list"),
    ("--model.num_classes ten", 'Expected `num_classes` to be a whole number, but got "ten". Pass a whole number.'),
    ("--trainer.accelerator tpu", "Use `--trainer.accelerator cpu`"),
    (
        "--trainer.strategy.max_vectorized_clients none",
        'Expected `max_vectorized_clients` to be a whole number or "auto", but got "none". Leave it out '
        '(default of the class: "auto").',
    ),
    ("--trainer.strategy.server_optimizer SGDD", "but got SGDD. Did you mean SGD?"),
    ("--trainer.strategy.compression TopKK", "but got TopKK. Did you mean TopK?"),
    (
        "--trainer.strategy.compression TopK --trainer.strategy.compression.share 3",
        "Expected an argument of lightning_fcl.TopK, but got `share`. Use fraction, bits.",
    ),
    ("--trainer.logger CSVLoger", "but got CSVLoger. Did you mean CSVLogger?"),
    ("--seed_everything -1", "Expected `seed_everything` to be between 0 and 4294967295, but got -1"),
    ("--print_confg", "Expected a value after `--print_confg`, but got none. Did you mean --print_config?"),
    ("--model.pretrained mlp.digit.flwf2t", "Did you mean mlp.digits.flwf2t_replay?"),
]
OTHERS = [
    ("fit quickstart --config nothing.yaml", "Expected a recipe at nothing.yaml, but there is no such file"),
    (
        "fit quickstart --out key.yaml/run",
        "Expected a folder for results at key.yaml/run, but key.yaml is a file. Use",
    ),
    ("ls method", "Did you mean methods?"),
    ("ls methods FedVit2", "Did you mean FedViT?"),
    ("cp quickstart no/such/folder.yaml", "Expected to write no/such/folder.yaml, but got: "),
    ("test", "Expected a checkpoint to test, but got none. Pass only the folder of a run"),
    ("test nothing", "Expected the folder of a run at nothing but found no such folder. Pass the folder"),
    ("export nothing", "Expected the folder of a run at nothing but found no such folder. Pass the folder"),
    ("fti quickstart", "got fti. Did you mean fit?"),
    (
        "fit",
        "Expected a recipe with a `model`, but got a recipe without a `model`. Pass a recipe with a model",
    ),
    ("fit empty.yaml", "empty.yaml to contain settings by name, as in trainer: {max_epochs: 3}, but got nothing"),
    ("fit list.yaml", "Expected list.yaml to contain settings by name"),
    ("fit --help=FedVit", "Did you mean FedViT?"),
    ("fit flwf/flwf-2t-tf", "Did you mean flwf/flwf-2t-ft?"),
    ("fit flwf/flwf@large", "Expected the name of a recipe or a YAML file, but got flwf/flwf@large"),
    ("validate quickstart --model.model.sizes [63,10]", "Expected `model` to take samples of the data, of shape"),
    ("tune nothing.yaml", "Expected a YAML file at nothing.yaml but there is none"),
    ("tune search.yaml", "got objectiv. Did you mean objective?"),
    (
        "tune argument.yaml",
        "Expected argument.yaml to be a search file, but got a recipe. Write a search file with `configs",
    ),
    (
        "fit runs/nosuch",
        "Expected a recipe at runs/nosuch, but there is no such path. Pass a YAML file.",
    ),
    (
        "fit quickstart project/module.yaml",
        "No module named 'in_project'. Run the command in project, which contains in_project.py",
    ),
    ("reproduce flwff", "or the path of a file with rows, but got flwff. Did you mean flwf?"),
    ("reproduce flwf --rows 'CL-FT, NoRow'", 'but got "NoRow"'),
    ("reproduce flwf --rows FLwF2T", "Did you mean FLwF-2T?"),
    ("reproduce flwf --seeds 0", "Expected `seeds` to be at least 1 but got 0"),
    ("reproduce flwf --workers 0", "`workers` to be at least 1 but got 0"),
    ("reproduce flwf --scale tiny", "invalid choice: 'tiny'"),
    ("data verify uchar", "cannot be used: uchar"),
    ("data ls --foo", "Expected a value after `--foo`, but got none. Did you mean --root?"),
    ("data ls --foo=1", "Expected no settings of a recipe for `data ls`, but got --foo 1. Remove them"),
    ("data show", "Expected at least one recipe, but got none"),
    ("data show quickstart --out stream.jpg", "`--out` to be a file that ends in .png, but got stream.jpg"),
    ("data show quickstart --out nowhere/stream.png", "Expected to write nowhere/stream.png, but got: "),
    ("data show quickstart nested.yaml", "but got Blurry. Write lightning_fcl.data.scenarios.Blurry."),
    ("zoo info mlp.digit", "Expected the name of a published model, but got 'mlp.digit'"),
    ("zoo predict mlp.digits.flwf2t_replay nothing.csv", "Expected a CSV file at nothing.csv, but the file does"),
    ("zoo push nothing --name x --to z", "Pass the folder of a finished run"),
    ("edge-report nothing.yaml", "Expected a recipe at nothing.yaml, but there is no such file"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "in_project.py").touch()
    (tmp_path / "project" / "module.yaml").write_text("model: {class_path: in_project.MyNet}")


LATER = [pytest.param(*one, marks=pytest.mark.slow) for one in FIT[12:]]


@pytest.mark.parametrize(("words", "message"), [*FIT[:12], *LATER])
def test_fit_invalid_words_print_message_with_fix(words, message, error_of):
    before = ["--trainer.enable_progress_bar", "false", "--out", "out"]
    own = words.split()
    recipes = [word for word in own if word.endswith(".yaml")]
    assert message in error_of(["fit", "quickstart", *recipes, *before, *[word for word in own if word not in recipes]])


@pytest.mark.parametrize(("words", "message"), OTHERS)
def test_command_invalid_words_print_message_with_fix(words, message, error_of):
    assert message in error_of(shlex.split(words))


BROKEN = """
from lightning_fcl import Classifier
from torch import nn

class Broken(Classifier):
    def __init__(self):
        super().__init__(nn.Flatten(), 64)

    def setup(self, stage):
        __import__("os").environ["nobody has foreseen this"]  # raises KeyError in a file of Python
"""


@pytest.mark.seconds
def test_unexpected_error_writes_traceback_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_model.py").write_text(BROKEN)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ["fit", "quickstart", "--model", "broken_model.Broken", "--trainer.enable_progress_bar", "false"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "an unexpected KeyError: 'nobody has foreseen this'" in said and "report it" in said
    (kept,) = tmp_path.glob("lightning-fcl-error-*.txt")
    assert str(kept) in said and "Traceback" not in said and "broken_model.py, line 10. " in said
    text = kept.read_text()
    assert text.startswith("lightning-fcl fit quickstart --model broken_model.Broken")
    assert f"lightning-fcl {lightning_fcl.__version__}, Python " in text
    assert "Traceback" in text and 'broken_model.py", line 10, in setup' in text
    monkeypatch.setenv("LIGHTNING_FCL_TRACEBACK", "1")
    with pytest.raises(KeyError, match="foreseen"):
        main(words)
