"""Tests of `lightning-fcl appendix`: facts of runs, LaTeX, Markdown, BibTeX, unfinished runs and wrong use."""

import json
import re
import shutil
import sys

import pytest
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.bibliography import parse_bibtex
from lightning_fcl.evaluation.results import read_results, write_results
from lightning_fcl.evaluation.run_data import read_run

SPECIAL = r"a_b%&# $x$ ~^{}\ <z> [q] `c` | * -- 'd' é"

MODULE = """
import torch
import lightning.pytorch as L
from lightning_fcl.methods import FedProx, Method

class Cited(Method):
    citations = ("@article{me2026, author = {Me, A.}, title = {B}, journal = {C}, year = {2026}}", "li2020fedprox")

class Plain_Method(FedProx):
    pass

class Net(L.LightningModule):
    def __init__(self, rate: float = 0.1, name: str = ""):
        super().__init__()
        self.net = torch.nn.Linear(64, 10)
    def forward(self, x):
        return self.net(x.flatten(1))
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def run_command(capsys, *words):
    main(["appendix", *map(str, words)])
    return capsys.readouterr().out


def split_bibtex(text):
    text, _, entries = text.partition("% BibTeX entries. Save them in a .bib file.")
    return text, entries


def cited_keys(latex):
    return {key for keys in re.findall(r"\\cite\{([^}]*)\}", latex) for key in keys.split(",")}


def check_latex(text):
    """Check that braces and environments are balanced, and that no special character is unescaped."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)[#%$~^](?!\\cite|\\pm|$)", re.sub(r"\$\\pm\$|~\\cite", "", body)), body
    bare = re.sub(r"\\[&%$#_{}]", "", body.replace("\\\\", ""))
    depth = 0
    for character in bare:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    stack = []
    for begin, name in re.findall(r"\\(begin|end)\{(\w+)\}", bare):
        if begin == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert stack == []
    commands = {*re.findall(r"\\([A-Za-z]+)", bare)}
    assert commands <= {
        *("begin", "end", "paragraph", "texttt", "cite", "centering", "caption", "small", "toprule", "midrule"),
        *("bottomrule", "pm", "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater"),
        *("textbar", "textasciigrave", "textquotedbl"),
    }, commands
    for table in re.findall(r"\\begin\{tabular\}\{(l+)\}(.*?)\\end\{tabular\}", body, re.DOTALL):
        rows = [line for line in table[1].splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        for row in rows:
            assert len(re.findall(r"(?<!\\)&", row)) == len(table[0]) - 1, row
            assert not row.lstrip().startswith(("[", "*")), row
    assert not re.search(r"--|[<>|`]", bare)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_recipe, without_pages):
    """Return a folder with two seeds of a method, and a run with own classes and special characters."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(small_recipe(rounds=2, clients=3)))
    (folder / "own_appendix_classes.py").write_text(MODULE)
    recipe = {
        "trainer": {
            "max_epochs": 2,
            "callbacks": [
                {"class_path": "own_appendix_classes.Cited"},
                {"class_path": "own_appendix_classes.Plain_Method", "init_args": {"mu": 0.25}},
            ],
            "strategy": {
                "class_path": "lightning_fcl.FederatedStrategy",
                "init_args": {
                    "participation": 2,
                    "local_epochs": 1,
                    "server_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
                    "synchronization": None,
                },
            },
        },
        "model": {"class_path": "own_appendix_classes.Net", "init_args": {"rate": 0.125, "name": SPECIAL}},
        "data": {"data": "digits", "partition": {"class_path": "Shards", "init_args": {"num_clients": 4}}},
        "recipe": {"row": SPECIAL},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    sys.path.append(str(folder))
    with without_pages():
        for seed in ("3", "5"):
            out = folder / "method" / f"seed-{seed}"
            main(["fit", "quickstart", str(folder / "tiny.yaml"), "--seed_everything", seed, "--out", str(out)])
        main(["fit", str(folder / "own.yaml"), "--out", str(folder / "own")])
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("own_appendix_classes", None)


@pytest.mark.seconds
def test_appendix_contains_facts_of_the_record(runs, capsys):
    text = run_command(capsys, runs / "method")
    results = [read_results(runs / "method" / f"seed-{seed}") for seed in (3, 5)]
    config = yaml.safe_load((runs / "method" / "seed-3" / "config.yaml").read_text())
    environment = json.loads((runs / "method" / "seed-3" / "environment.json").read_text())
    latex, bibtex = split_bibtex(text)
    check_latex(latex)
    strategy, stream = config["trainer"]["strategy"]["init_args"], config["data"]
    assert "The number of clients is 3." in latex and "The random seeds are 3 and 5." in latex
    assert f"The clients trained for {strategy['local_epochs']} local epoch" in latex
    assert f"with batches of {stream['batch_size']} samples" in latex
    assert f"(participation = {strategy['participation']})" in latex
    assert "Training took 2 rounds" in latex and environment["data"]["sha256"][:16] in latex
    assert results[0]["machine"].split(",")[0] in latex and environment["python"] in latex
    for name, version in results[0]["versions"].items():
        assert f"{name} {version}" in latex
    learning_rate = config["model"]["init_args"]["optimizer"]["init_args"]["lr"]
    assert rf"The optimizer is \texttt{{SGD}} (lr = {learning_rate}" in latex
    seconds = sum(entry["seconds"] for run in results for entry in run["record"]["rounds"]) / 2
    assert f"A run took {seconds:.1f} s on average over the seeds" in latex
    values = [run["metrics"]["final_accuracy/server"] for run in results]
    mean, std = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
    assert rf"{mean:.3f} $\pm$ {std:.3f}" in latex
    assert cited_keys(latex) == {entry.key for entry in parse_bibtex(bibtex)}
    assert {
        "usmanova2021flwf",
        "chaudhry2019replay",
        "alpaydin1998digits",
        "mcmahan2017fedavg",
        "lightning_fcl",
    } == cited_keys(latex)
    for value in (r"\texttt{alpha} & \texttt{0.5}", r"\texttt{memory\_size}", r"\texttt{sizes}"):
        assert value in latex
    assert "null" not in latex and "num\\_workers" not in latex


@pytest.mark.seconds
def test_appendix_of_own_classes_escapes_names_and_uses_own_citations(runs, capsys):
    latex, bibtex = split_bibtex(run_command(capsys, runs / "own", runs / "method"))
    check_latex(latex)
    assert r"\texttt{Cited}~\cite{me2026,li2020fedprox} and \texttt{Plain\_Method}." in latex
    assert r"The optimizer of the server is \texttt{SGD} (lr = 0.5)~\cite{reddi2021fedopt}." in latex
    assert "The recipe names no optimizer" in latex and "2 clients downloaded" in latex
    assert latex.count(r"\paragraph") == 2 and r"a\_b\%\&\#" in latex
    entries = parse_bibtex(bibtex)
    assert cited_keys(latex) == {entry.key for entry in entries} and len({entry.key for entry in entries}) == len(
        entries
    )
    assert next(entry for entry in entries if entry.key == "me2026").fields["title"] == "B"
    markdown = run_command(capsys, runs / "own", "--format", "markdown")
    assert "`Plain_Method`." in markdown and r"a\_b%&\# \$x\$" in markdown and "```bibtex\n@" in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert lines and {len(re.findall(r"(?<!\\)\|", line)) for line in lines if "SGD" in line} == {4}


@pytest.mark.seconds
def test_appendix_without_importable_classes_names_them(runs, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "own_appendix_classes")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(runs)])
    text = run_command(capsys, runs / "own")
    assert r"\texttt{Cited} and \texttt{Plain\_Method}." in text and "me2026" not in text and "FedAvg" not in text
    assert "% The class own_appendix_classes.Cited could not be imported" in text
    check_latex(split_bibtex(text)[0])


@pytest.mark.seconds
def test_appendix_of_unfinished_runs_states_the_rounds(runs, tmp_path, capsys):
    for seed in (3, 5):
        shutil.copytree(runs / "method" / f"seed-{seed}", tmp_path / "m" / f"seed-{seed}")
    record = tmp_path / "m" / "seed-5" / "record.jsonl"
    lines = record.read_text().splitlines()
    rounds = [number for number, line in enumerate(lines) if "round" in json.loads(line)]
    record.write_text("\n".join(lines[: rounds[1]]) + "\n")
    for name in ("results.json", "environment.json", "files.txt", "metrics.json"):
        (tmp_path / "m" / "seed-5" / name).unlink()
    text = run_command(capsys, tmp_path / "m")
    assert "UNFINISHED: The run with seed 5 has not finished. The results are those after 1 round." in text
    assert "Training took 1 to 2 rounds" in text and "The random seeds are 3 and 5." in text
    check_latex(split_bibtex(text)[0])
    value = read_run(tmp_path / "m" / "seed-5").metrics["final_accuracy/server"]
    alone = run_command(capsys, tmp_path / "m" / "seed-5")
    assert (
        f"{value:.3f}" in alone
        and "Hardware" not in alone
        and r"Software: lightning-fcl~\cite{lightning_fcl}." in alone
    )


@pytest.mark.seconds
def test_appendix_of_stopped_run_and_missing_files(runs, tmp_path, capsys):
    shutil.copytree(runs / "method" / "seed-3", tmp_path / "m")
    results = read_results(tmp_path / "m")
    write_results(tmp_path / "m", {**results, "finished": False})
    (tmp_path / "m" / "config.yaml").unlink()
    (tmp_path / "m" / "environment.json").write_text("{")
    text = run_command(capsys, tmp_path / "m")
    assert "UNFINISHED: The run with seed 3" in text and "The recipe of the run is missing" in text
    assert r"\texttt{FLwF2T} and \texttt{Replay}" in text and r"\texttt{MLP in Classifier}" in text
    assert "optimizer" not in text and "Hyperparameters" not in text
    check_latex(split_bibtex(text)[0])


@pytest.mark.seconds
def test_appendix_states_settings_that_differ_between_seeds(runs, tmp_path, capsys):
    for seed in (3, 5):
        shutil.copytree(runs / "method" / f"seed-{seed}", tmp_path / "m" / f"seed-{seed}")
    path = tmp_path / "m" / "seed-5" / "config.yaml"
    path.write_text(path.read_text().replace("alpha: 0.5", "alpha: 0.75"))
    text = run_command(capsys, tmp_path / "m")
    assert r"These settings differ between the runs: \texttt{FLwF2T.alpha}." in text
    assert r"\texttt{alpha} & \texttt{0.5; 0.75}" in text


@pytest.mark.seconds
def test_appendix_out_writes_text_and_bibtex(runs, tmp_path, capsys):
    out = tmp_path / "new" / "appendix.tex"
    printed = [run_command(capsys, runs / "method", "--out", out) for _ in range(2)]
    assert printed[0] == printed[1] == f"Wrote {out} and {out.with_suffix('.bib')}\n"
    latex, bibtex = split_bibtex(run_command(capsys, runs / "method"))
    assert out.read_text().strip() == latex.strip()
    entries = parse_bibtex(out.with_suffix(".bib").read_text())
    assert [entry.text for entry in entries] == [entry.text for entry in parse_bibtex(bibtex)]
    other = tmp_path / "refs.bib"
    other.write_text("@misc{mine, note={x}}")
    with pytest.raises(SystemExit):
        main(["appendix", str(runs / "method"), "--out", str(tmp_path / "refs.tex")])
    assert "Expected" in capsys.readouterr().err and other.read_text() == "@misc{mine, note={x}}"
    assert not (tmp_path / "refs.tex").exists()


@pytest.mark.seconds
def test_appendix_hints_on_out_work(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["appendix", str(runs / "own"), "--out", "a.bib"])
    fix = re.search(r"Use --out (\S+)\.\n", capsys.readouterr().err)[1]
    (tmp_path / "b.bib").write_text("")
    with pytest.raises(SystemExit):
        main(["appendix", str(runs / "own"), "--out", "b.tex"])
    assert "Use another --out, or move this file." in capsys.readouterr().err and fix == "a.tex"
    (tmp_path / "b.bib").rename(tmp_path / "c.bib")
    for out in (fix, "b.tex"):
        assert run_command(capsys, runs / "own", "--out", out) == f"Wrote {out} and {out[0]}.bib\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: RUN"),
        (["missing"], "Expected missing to contain a run"),
        (["."], "Expected . to contain a run"),
        ([".", "--format", "html"], "invalid choice: 'html'"),
        ([".", "--out", "a.bib"], "Use --out a.tex."),
    ],
)
def test_appendix_wrong_use_raises(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(["appendix", *words])
    assert error.value.code == 2 and message in capsys.readouterr().err
