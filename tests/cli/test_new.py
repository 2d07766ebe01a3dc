"""Tests of `lightning-fcl new method`: names, files, errors, and skeletons that work as written."""

import builtins
import keyword
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import lightning_fcl
from lightning_fcl.cli import new
from lightning_fcl.cli.main import main
from lightning_fcl.cli.new import derive_names
from lightning_fcl.errors import InvalidValueError

ROOT = Path(lightning_fcl.__file__).parents[1]
CHECK = ["check", "--isolated", "--no-cache", "--line-length", "120", "--ignore", "D103,ANN401"]
CHECK += ["--select", "A,ANN,B,D,E,F,I,N,RUF,SIM,UP,W", "--config", 'lint.pydocstyle.convention = "google"']


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to an empty folder for the test. Unload the modules of the folder afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run(folder, *words):
    """Run a Python module in a folder, without the folder in `sys.path`, as an installed command does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FedAnchor", ("FedAnchor", "fed_anchor")),
        ("fed_anchor", ("FedAnchor", "fed_anchor")),
        ("FedEWCPlus", ("FedEWCPlus", "fed_ewc_plus")),
        ("EWC2Fed", ("EWC2Fed", "ewc2_fed")),
        ("anchor", ("Anchor", "anchor")),
        ("fed_2", ("Fed2", "fed_2")),
        ("X", ("X", "x")),
        ("Protest", ("Protest", "protest")),
        ("Testify", ("Testify", "testify")),
    ],
)
def test_derive_names_valid_name_returns_class_and_module(name, expected):
    assert derive_names(name) == expected
    assert all(one.isidentifier() and not keyword.iskeyword(one) for one in expected)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "fed-anchor",
            "fed anchor",
            "3d",
            "_fed",
            "fed_",
            "fed__a",
            "Fed_Anchor",
            "fedAnchor",
            "",
            "été",
            "a.b",
            "a/b",
        ),
        *("../x", "--x", "x" * 46, "FedAnchor\n"),
        *("class", "Class", "lambda", "None", "True", "import"),
        *("Exception", "Warning", "Tensor", "Statement"),
        *("conftest", "test", "TestX", "test_x", "x_test", "Test"),
        *("FedProx", "fedprox", "fed_prox", "ewc", "Replay", "Method", "Step", "client", "ContinualMetrics"),
    ],
)
def test_derive_names_unusable_name_raises_with_usable_name(name):
    with pytest.raises(InvalidValueError, match="Use a name such as") as caught:
        derive_names(name)
    assert (caught.value.argument, caught.value.value) == ("name", name)
    suggestion = caught.value.hint.removeprefix("Use a name such as ").removesuffix(".")
    class_name, module_name = derive_names(suggestion)
    assert not hasattr(builtins, class_name) and module_name not in sys.stdlib_module_names


@pytest.mark.parametrize("name", ["Random", "random", "numpy", "Torch", "LightningFcl", "sys", "json"])
def test_new_name_of_installed_module_raises(here, error_of, name):
    message = error_of(["new", "method", name])
    assert "Python has an installed module" in message and not [*here.iterdir()]
    main(["new", "method", message.partition("Use a name such as ")[2].partition(".")[0]])


def test_new_names_imported_by_templates_are_reserved():
    imported = {"dataclass", "annotations"}
    for template in new._TEMPLATES.glob("*.py.template"):
        for line in template.read_text().splitlines():
            if line.startswith("from ") and "${" not in line:
                imported |= {name.strip() for name in line.partition(" import ")[2].split(",")}
    for name in imported:
        if name[0].isupper():
            with pytest.raises(InvalidValueError):
                derive_names(name)


@pytest.mark.parametrize("taken", ["fed_anchor.py", "fed_anchor.yaml", "test_fed_anchor.py"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_new_existing_file_raises_and_writes_nothing(here, error_of, taken, kind):
    path = here / taken
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(here / "missing")
    assert f"{taken} exists. Nothing was written." in error_of(["new", "method", "FedAnchor"])
    assert [one.name for one in here.iterdir()] == [taken]
    assert kind != "file" or path.read_text() == "mine"


def test_new_existing_file_is_avoided_with_other_name_or_folder(here, error_of):
    (here / "other").mkdir()
    main(["new", "method", "FedAnchor"])
    assert "Use another NAME, or another `--out`." in error_of(["new", "method", "fed_anchor"])
    main(["new", "method", "FedAnchorTwo"])
    main(["new", "method", "FedAnchor", "--out", "other"])
    assert len([*here.rglob("*.py")]) == 6


def test_new_out_that_is_a_file_is_avoided_with_other_folder(here, error_of):
    (here / "notes").touch()
    assert "Use another folder for `--out`." in error_of(["new", "method", "FedAnchor", "--out", "notes"])
    main(["new", "method", "FedAnchor", "--out", "."])


def test_new_package_of_same_name_raises(here, error_of):
    (here / "fed_anchor").mkdir()
    (here / "fed_anchor" / "__init__.py").touch()
    assert "is a package of the same name" in error_of(["new", "method", "FedAnchor"])
    assert [one.name for one in here.iterdir()] == ["fed_anchor"]


def test_new_folder_of_same_name_does_not_hide_module(here):
    (here / "fed_anchor").mkdir()
    main(["new", "method", "FedAnchor"])
    assert run(here, "lightning_fcl", "validate", "fed_anchor.yaml").returncode == 0


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("missing", "missing does not exist. Create the folder with `mkdir -p missing`"),
        ("a file", "a file is a file. Use another folder for `--out`."),
        ("missing/a b", "`mkdir -p 'missing/a b'`"),
    ],
)
def test_new_invalid_out_raises(here, error_of, folder, message):
    (here / "a file").touch()
    assert message in error_of(["new", "method", "FedAnchor", "--out", folder])
    assert [one.name for one in here.iterdir()] == ["a file"]


def test_new_missing_out_is_created_with_command_in_hint(here, error_of):
    message = error_of(["new", "method", "FedAnchor", "--out", "my methods"])
    subprocess.run(shlex.split(message.partition("with `")[2].partition("`")[0]), check=True)
    main(["new", "method", "FedAnchor", "--out", "my methods"])
    assert len([*(here / "my methods").iterdir()]) == 3


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="there is no folder that nobody can write to")
def test_new_unwritable_out_raises(here, error_of):
    assert "Expected to write /proc/fed_anchor.py" in error_of(["new", "method", "FedAnchor", "--out", "/proc"])


def test_new_failed_last_file_leaves_no_file(here, error_of, monkeypatch):
    def fail_for_test(path, *args, **options):
        if Path(path).name == "test_fed_anchor.py":
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *args, **options)

    monkeypatch.setattr(new, "open", fail_for_test, raising=False)
    message = error_of(["new", "method", "FedAnchor"])
    assert "Expected to write test_fed_anchor.py" in message and "use another folder" in message
    assert not [*here.iterdir()]


def test_new_keyboard_interrupt_leaves_no_file(here, monkeypatch):
    def interrupt(path, *args, **options):
        if Path(path).suffix == ".yaml":
            raise KeyboardInterrupt
        return open(path, *args, **options)

    monkeypatch.setattr(new, "open", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        new.write_new_files({here / "a.py": "a", here / "a.yaml": "b"})
    assert not [*here.iterdir()]


@pytest.mark.parametrize("words", [[], ["methd", "X"], ["method"], ["method", "X", "Y"], ["method", "X", "--force"]])
def test_new_invalid_words_print_usage(here, capsys, words):
    with pytest.raises(SystemExit) as end:
        main(["new", *words])
    assert end.value.code == 2 and "usage: lightning-fcl new" in capsys.readouterr().err
    assert not [*here.iterdir()]


@pytest.mark.parametrize(
    ("words", "text"), [(["--help"], "write a method"), (["method", "--help"], "lightning-fcl new method FedAnchor")]
)
def test_new_help_describes_command(capsys, words, text):
    with pytest.raises(SystemExit) as end:
        main(["new", *words])
    assert not end.value.code and text in capsys.readouterr().out


def test_new_output_names_commands(here, capsys):
    (here / "my methods").mkdir()
    main(["new", "method", "fed_anchor", "--out", "my methods"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    written = [f"my methods/{name}" for name in ("fed_anchor.py", "fed_anchor.yaml", "test_fed_anchor.py")]
    assert lines[1:4] == written and all((here / name).is_file() for name in written)
    commands = ["cd 'my methods'", "pytest test_fed_anchor.py", "lightning-fcl fit fed_anchor.yaml"]
    assert lines[-3:] == commands


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["FedAnchor", "x", "A" * 25 + "b" * 20])
def test_skeleton_is_formatted_and_linted(here, name):
    main(["new", "method", name])
    files = [path.name for path in here.glob("*.py")]
    for words in (["ruff", *CHECK], ["ruff", "format", "--isolated", "--no-cache", "--line-length", "120", "--check"]):
        done = run(here, *words, *files)
        assert done.returncode == 0, done.stdout
    words = {word.strip(".:#").upper() for path in here.iterdir() for word in path.read_text().split()}
    assert not words & {"TODO", "FIXME", "XXX"}


@pytest.mark.slow
def test_skeleton_has_types(here):
    main(["new", "method", "FedAnchor"])
    done = run(here, "mypy", "--strict", "--cache-dir", os.devnull, "--follow-imports", "silent", ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.seconds
def test_skeleton_test_passes_with_pytest(here):
    main(["new", "method", "FedAnchor"])
    done = run(here, "pytest", "-q", "-p", "no:cacheprovider", "test_fed_anchor.py")
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.seconds
def test_skeleton_test_finds_wrong_penalty(here):
    main(["new", "method", "FedAnchor"])
    path = here / "fed_anchor.py"
    path.write_text(path.read_text().replace("self.strength / 2 *", "self.strength *"))
    done = run(here, "pytest", "-q", "-p", "no:cacheprovider", "test_fed_anchor.py", "-k", "formula")
    assert done.returncode == 1 and "1 failed" in done.stdout


@pytest.mark.seconds
def test_skeleton_recipe_trains_class_of_working_directory(here):
    main(["new", "method", "FedAnchor"])
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "4"]
    done = run(here, "lightning_fcl", "fit", "fed_anchor.yaml", *quiet)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((here / "runs/fed_anchor/config.yaml").read_text())
    assert [one["class_path"] for one in config["trainer"]["callbacks"]] == ["fed_anchor.FedAnchor"]


@pytest.mark.parametrize("size", [1, 3])
def test_skeleton_equals_independent_computation(here, fit, make_stream, make_task, assert_same, size):
    """The method equals FedProx whose reference point is the client's own model instead of the received model."""
    main(["new", "method", "FedAnchor"])
    sys.path.append(str(here))
    from fed_anchor import FedAnchor

    class Reference(lightning_fcl.callbacks.Method):
        vectorizable = False

        def __init__(self):
            super().__init__()
            self.models = {}

        def penalty(self, client, step):
            own = self.models.get(client.client_round.client_id, step.received_state)
            return 0.3 * torch.stack([((value - own[n]) ** 2).sum() for n, value in step.params.items()]).sum()

        def update_client_state(self, client, trained_state, data):
            self.models[client.client_round.client_id] = {n: value.clone() for n, value in trained_state.items()}
            return {}

    tasks = [make_task() for _ in range(3)]
    for task, methods, group in zip(tasks, ([FedAnchor(strength=0.6)], [Reference()], []), (size, 1, 1), strict=True):
        fit(task, make_stream(), methods, seed=0, max_vectorized_clients=group)
    assert_same(tasks[0], tasks[1], 1e-5)
    with pytest.raises(AssertionError):
        assert_same(tasks[0], tasks[2], 1e-4)
