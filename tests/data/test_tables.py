"""Tests of tables: samples from CSV and parquet files, and error messages about cells and columns."""

import math
import struct
from decimal import Decimal

import numpy as np
import pytest
import torch
from raising import raises
from torch.utils.data import Subset

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.data.tables import Table
from lightning_fcl.errors import InvalidValueError, LightningFCLError


def write(folder, text, name="site.csv", **options):
    path = folder / name
    path.write_text(text, **{"encoding": "utf-8", **options})
    return path


def single(value):
    """Return a number rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def test_table_columns_are_matched_by_name(tmp_path):
    path = write(tmp_path, 'id,load, speed,label\n7,2,1.5,walk\n\n8,-4e-1,0.1,"sit, lean"\n')
    table = Table(path, "label", ["speed", "load"])
    assert table.x.tolist() == [[1.5, 2.0], [single(0.1), single(-0.4)]]
    assert table.targets.tolist() == ["walk", "sit, lean"]
    assert len(table) == 2 and table[1][1] == "sit, lean"


def test_table_of_a_spreadsheet_is_read(tmp_path):
    """Spreadsheets write a byte order mark and Windows line ends."""
    path = write(tmp_path, "a,label\r\n1,é\r\n2,b\r\n", encoding="utf-8-sig", newline="")
    assert Table(path, "label", ["a"]).targets.tolist() == ["é", "b"]


def test_table_scales_features_only_if_mean_and_std_given(tmp_path):
    path = write(tmp_path, "a,b,y\n1,10,0.5\n3,30,1.5\n")
    assert Table(path, "y", ["a", "b"]).x.tolist() == [[1, 10], [3, 30]]
    assert Table(path, "y", ["a", "b"], mean=[1, 20], std=[2, 10]).x.tolist() == [[0, -1], [1, 1]]


@pytest.mark.parametrize(
    ("column", "targets"),
    [
        ("1 0 2", np.array([1, 0, 2])),
        ("1 x 2", np.array(["1", "x", "2"])),
        ("1 0.5 2", np.array([1, 0.5, 2], np.float32)),
    ],
)
def test_table_targets_are_integers_text_or_numbers(tmp_path, column, targets):
    path = write(tmp_path, "a,y\n" + "".join(f"0,{cell}\n" for cell in column.split()))
    found = Table(path, "y", ["a"]).targets
    assert found.dtype == targets.dtype and found.tolist() == targets.tolist()


def test_table_of_several_targets_has_numbers(tmp_path):
    path = write(tmp_path, "a,u,v\n0,1,2\n0,3,4\n")
    table = Table(path, ["v", "u"], ["a"])
    assert table.targets.dtype == np.float32 and table.targets.tolist() == [[2, 1], [4, 3]]
    assert table[1][1].tolist() == [4, 3]


HEADER = "a,b,y\n1,2,p\n"
BAD = {
    "missing cell": ("3,,q", ["`b`", "row 3", "line 3", "remove the row"]),
    "missing word": ("NA,3,q", ["`a`", "row 3", "remove the row"]),
    "not a number": ("nan,3,q", ["`a`", "row 3", "remove the row"]),
    "infinite": ("inf,3,q", ["`a`", "row 3", "'inf'"]),
    "text": ("3,fast,q", ["`b`", "row 3", "'fast'"]),
    "digits with underscores": ("3,1_0,q", ["`b`", "row 3", "'1_0'"]),
    "decimal comma in quotes": ('3,"1,5",q', ["`b`", "row 3", "Write 1.5, with a decimal point"]),
    "decimal comma": ("3,1,5,q", ["row 3", "got 4", "decimal numbers with a point"]),
    "fewer cells": ("3,4", ["row 3", "got 2"]),
    "no target": ("3,4,", ["`y`", "row 3", "remove the row"]),
    "lines in text": ('"3","4","q\nr"\n5,,s', ["`b`", "row 4", "line 5"]),
}


@pytest.mark.parametrize("case", BAD)
def test_table_names_row_and_column_of_an_invalid_cell(tmp_path, case):
    row, parts = BAD[case]
    path = write(tmp_path, f"{HEADER}{row}\n")
    with pytest.raises(LightningFCLError) as caught:
        len(Table(path, "y", ["a", "b"]))
    assert [part for part in (str(path), *parts) if part not in str(caught.value)] == []


def test_table_rejects_text_among_decimal_targets(tmp_path):
    path = write(tmp_path, 'a,y\n0,1.5\n0,"2,5"\n')
    with pytest.raises(LightningFCLError, match=r"number in column `y` .* row 3 .*Write 2\.5"):
        len(Table(path, "y", ["a"]))


COLUMNS = {
    "missing": ("a,c,y\n1,2,p\n", ["`speed`", "a, c, y"]),
    "near": ("a,sped,y\n1,2,p\n", ["`speed`", "Did you mean sped"]),
    "twice": ("a,speed,speed,y\n1,2,2,p\n", ["`speed`", "columns 2, 3"]),
    "semicolons": ("a;speed;y\n1;2;p\n", ["`a`", "Separate the columns by commas"]),
    "no header": ("", ["`a`", "an empty file"]),
    "no rows": ("a,speed,y\n", ["at least one row of values"]),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_table_names_missing_and_duplicate_columns(tmp_path, case):
    text, parts = COLUMNS[case]
    path = write(tmp_path, text)
    with pytest.raises(LightningFCLError) as caught:
        len(Table(path, "y", ["a", "speed"]))
    assert [part for part in (str(path), *parts) if part not in str(caught.value)] == []


def test_table_ignores_duplicate_columns_that_are_not_used(tmp_path):
    path = write(tmp_path, "a,note,note,y\n1,,,p\n")
    assert Table(path, "y", ["a"]).x.tolist() == [[1]]


@pytest.mark.parametrize("content", [b"a,y\n1,\xff\n", b'a,y\n1,"p\n'])
def test_table_that_is_not_text_raises_with_path(tmp_path, content):
    path = tmp_path / "site.csv"
    path.write_bytes(content)
    with pytest.raises(LightningFCLError, match=r"site\.csv to be a CSV file in UTF-8 but got: "):
        len(Table(path, "y", ["a"]))


WRONG = {
    "path": {"path": "site.xlsx"},
    "target": {"target": []},
    "features": {"features": ["a", "a"]},
    "mean": {"mean": [1.0, 2.0]},
    "std": {"std": [0.0]},
}


@pytest.mark.parametrize("argument", WRONG)
def test_table_invalid_argument_raises(argument):
    with pytest.raises(LightningFCLError) as caught:
        Table(**{"path": "site.csv", "target": "y", "features": ["a"], **WRONG[argument]})
    assert caught.value.argument == argument


def test_table_target_in_features_raises():
    with pytest.raises(LightningFCLError, match="Remove `y` from `features`"):
        Table("site.csv", "y", ["a", "y"])


def test_stream_of_tables_equals_stream_of_arrays(tmp_path):
    rng = np.random.default_rng(0)
    x, y, owner = rng.normal(size=(60, 2)), np.array(["p", "q", "r"])[rng.integers(3, size=60)], np.arange(60) % 2
    for client in (0, 1):
        rows = [
            f"{a!r},{b!r},{label}"
            for (a, b), label in zip(x[owner == client].tolist(), y[owner == client], strict=True)
        ]
        write(tmp_path, "\n".join(["a,b,label", *rows]), f"{client}.csv")
    common = {"scenario": ClassIncremental(3), "split": Split(test=0.0), "seed": 3}
    one = FederatedStream([Table(tmp_path / f"{client}.csv", "label", ["a", "b"]) for client in (0, 1)], **common)
    other = FederatedStream.from_arrays(x, y, owner, **common)
    for stream in (one, other):
        stream.setup("fit")
    assert one.samples.classes == other.samples.classes
    for number in range(3):
        for client in other.plan.train[number]:
            pairs = zip(one.client_samples(client, number, 0), other.client_samples(client, number, 0), strict=True)
            assert all(torch.equal(here, there) for here, there in pairs)


def write_parquet(folder, columns):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_arrays([arrow.array(values) for values in columns.values()], list(columns))
    parquet.write_table(table, folder / "site.parquet")
    return folder / "site.parquet"


def test_parquet_file_equals_csv_file(tmp_path):
    columns = {
        "whole": [1, 2, 3],
        "label": ["p", "q", "p"],
        "exact": [Decimal("0.10"), Decimal("0.20"), Decimal("0.30")],
        "y": [0.1, 1e-3, 7.0],
        "is_on": [True, False, True],
    }
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    text = write(tmp_path, "\n".join([",".join(columns), *rows]))
    path = write_parquet(tmp_path, columns)
    for target in ("label", "y", "whole", "is_on"):
        features = [name for name in ("exact", "whole", "y") if name != target]
        one, other = Table(path, target, features), Table(text, target, features)
        assert torch.equal(one.x, other.x)
        assert one.targets.dtype.kind == other.targets.dtype.kind
        assert one.targets.tolist() == other.targets.tolist()


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"a": [1, None], "y": ["p", "q"]}, ["`a`", "row 3", "remove the row"]),
        ({"a": [1.0, math.nan], "y": ["p", "q"]}, ["`a`", "row 3", "remove the row"]),
        ({"a": [1, 2], "y": ["p", None]}, ["`y`", "row 3", "remove the row"]),
        ({"a": ["1", "1,5"], "y": ["p", "q"]}, ["`a`", "row 3", "Write 1.5"]),
        ({"a": [b"1", b"2"], "y": ["p", "q"]}, ["`a`", "binary"]),
        ({"b": [1, 2], "y": ["p", "q"]}, ["`a`", "b, y"]),
        ({"a": [], "y": []}, ["at least one row of values"]),
    ],
)
def test_parquet_file_names_row_and_column_of_an_invalid_cell(tmp_path, columns, parts):
    path = write_parquet(tmp_path, columns)
    with pytest.raises(LightningFCLError) as caught:
        len(Table(path, "y", ["a"]))
    assert [part for part in (str(path), *parts) if part not in str(caught.value)] == []


def test_damaged_parquet_file_raises_with_path(tmp_path):
    path = write_parquet(tmp_path, {"a": [1.0] * 50, "y": ["p"] * 50})
    content = path.read_bytes()
    for length in (0, 4, len(content) // 2, len(content) - 4):
        path.write_bytes(content[:length])
        with pytest.raises(LightningFCLError, match=r"site\.parquet to be a parquet file but got: "):
            len(Table(path, "y", ["a"]))


def test_tables_of_clients_have_features_in_one_order(tmp_path):
    path = write(tmp_path, "a,b,c,u,v\n" + "1,2,3,0.5,1.5\n" * 10)

    def set_up(features, target):
        tables = {
            "first": Table(path, ["u", "v"], ["a", "b"]),
            "second": Subset(Table(path, target, features), range(8)),
        }
        stream = FederatedStream(tables, scenario=Stationary())
        stream.setup("fit")
        return stream

    # A column with another name at the same position can have the same meaning.
    for features in (["a", "b"], ["c", "b"], ["a", "c"]):
        assert len(set_up(features, ["u", "v"]).plan.clients) == 2
    for features in (["b", "a"], ["b", "c"], ["c", "a"]):
        with raises(InvalidValueError, "features", value=tuple(features)):
            set_up(features, ["u", "v"])
    with raises(InvalidValueError, "target", value=("v", "u")):
        set_up(["a", "b"], ["v", "u"])
