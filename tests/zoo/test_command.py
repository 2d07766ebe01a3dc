"""Tests of the command `lightning-fcl zoo`."""

import json

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lightning_fcl.cli.main import main
from lightning_fcl.zoo.registry import list_models

NAME = "mlp.digits.flwf2t_replay"
DIGITS = load_digits()


@pytest.fixture
def digits(tmp_path):
    """Return the path of a CSV file of 100 images of digits. Each line is one image."""
    path = tmp_path / "digits.csv"
    np.savetxt(path, DIGITS.images[:100].reshape(100, -1), delimiter=",")
    return path


def test_zoo_ls_and_info_print_entry(small_zoo, capsys):
    main(["zoo", "ls", "*digits*"])
    line = capsys.readouterr().out
    assert line.startswith(f"{NAME}@1 ") and "0.769" in line and "MB" in line
    main(["zoo", "info", NAME])
    assert f"# {NAME}" in capsys.readouterr().out


def test_zoo_verify_prints_result(small_zoo, capsys):
    main(["zoo", "verify", NAME])
    assert "matches its card; accuracy 0.76" in capsys.readouterr().out


def test_zoo_predict_csv_file_prints_labels(small_zoo, digits, capsys):
    main(["zoo", "predict", NAME, str(digits)])
    labels = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    assert sum(label == str(y) for label, y in zip(labels, DIGITS.target[:100], strict=True)) >= 65
    main(["zoo", "predict", NAME, str(digits), "--json"])
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["sample"] == 0 and first["label"] == labels[0] and len(first["probabilities"]) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2,3\n", "64 columns with one line per sample, but got 3 columns"),
        ("", "64 columns with one line per sample, but got 0 columns"),
        ("1,2\n3\n", "the same number of columns in each line"),
        ("a,b\n1,x\n", "to contain numbers"),
        (f"1\n{'x' * 131_072}", "Correct the file"),
        (f"1\n{'1' * 131_073}", "64 columns"),
        (",".join(["99"] * 64), "at most 16.0 pixels of 16, but got 99"),
    ],
)
def test_zoo_predict_invalid_csv_file_raises(small_zoo, tmp_path, content, message, error_of):
    (tmp_path / "wrong.csv").write_text(content)
    error = error_of(["zoo", "predict", NAME, str(tmp_path / "wrong.csv")])
    assert message in error and len(error) < 1000


def test_zoo_download_to_folder_makes_registry(small_zoo, tmp_path, monkeypatch, capsys):
    main(["zoo", "download", NAME, "--to", str(tmp_path / "copy")])
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", str(tmp_path / "copy"))
    main(["zoo", "verify", NAME])
    assert "matches its card" in capsys.readouterr().out
    assert NAME in list_models()


def test_zoo_download_without_names_raises(small_zoo, error_of):
    assert "Expected names to download, or --all" in error_of(["zoo", "download"])
