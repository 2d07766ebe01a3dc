"""Tests of completion in real shells."""

import shutil
import subprocess
import sys

import pytest

from lightning_fcl.cli.main import COMMANDS
from lightning_fcl.runs.paper_rows import list_recipes

# The script simulates the tab key after the words.
TAB = """
source ./script
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
[ "{last}" = yes ] || {{ COMP_WORDS+=(""); COMP_CWORD=$(( COMP_CWORD + 1 )); }}
complete -p lightning-fcl > /dev/null && _shtab_lightning_fcl
printf "%s\\n" "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Write the completion script of bash without importing torch, and return the folder of the script."""
    folder = tmp_path_factory.mktemp("completion")
    code = "import sys; from lightning_fcl.cli.main import main; main(['completion', 'bash'])\n"
    code += "heavy = {'torch', 'lightning', 'avalanche'} & set(sys.modules); assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (folder / "script").write_text(done.stdout)
    (folder / "mine.yaml").touch()
    return folder


@pytest.mark.seconds
@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("lightning-fcl", "", {*COMMANDS}),
        ("lightning-fcl re", "yes", {"report", "reproduce"}),
        ("lightning-fcl fit", "", {*list_recipes()}),
        ("lightning-fcl fit qui", "yes", {"quickstart", "quickstart-private"}),
        ("lightning-fcl fit flwf/flwf-2t-", "yes", {n for n in list_recipes() if n.startswith("flwf/flwf-2t-")}),
        ("lightning-fcl validate mi", "yes", {"mine.yaml"}),
        ("lightning-fcl fit --seed_", "yes", {"--seed_everything"}),
        ("lightning-fcl ls sce", "yes", {"scenarios"}),
        ("lightning-fcl zoo ver", "yes", {"verify"}),
        ("lightning-fcl ne", "yes", {"new"}),
        ("lightning-fcl new me", "yes", {"method"}),
        ("lightning-fcl new method X --o", "yes", {"--out"}),
        ("lightning-fcl export runs --format o", "yes", {"onnx"}),
    ],
)
def test_bash_completion_returns_candidates(script, words, last, expected):
    done = subprocess.run(
        ["bash", "-c", TAB.format(words=words, last=last)], cwd=script, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = {*done.stdout.split()}
    if not last and "fit" not in words:
        assert expected <= found
    elif not last:
        assert expected <= found and "mine.yaml" in found
    else:
        assert found == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_zsh_completion_script_registers_function(tmp_path):
    code = "from lightning_fcl.cli.main import main; main(['completion', 'zsh'])"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900).stdout
    (tmp_path / "script").write_text(text)
    ask = "autoload -U compinit; compinit -D; source ./script; print ${_comps[lightning-fcl]}"
    done = subprocess.run(["zsh", "-fc", ask], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.stdout.strip() == "_shtab_lightning_fcl", done.stderr
