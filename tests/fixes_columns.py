"""Table of hints in the error messages of tables and targets."""

from datetime import date

import numpy as np
import pandas as pd
import pytest
from fixes import Row, stream_of_arrays, stream_of_data

from lightning_fcl.data.preprocessing import TablePreprocessor, TableStatistics
from lightning_fcl.data.tables import Table
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError, UnknownNameError

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


def save(lab, text, name="site.csv"):
    path = lab.folder / name
    path.write_text(text)
    return path


def read_table(lab, text="a,b,y\n1,2,p\n3,4,q\n", target="y", features=("a", "b"), name="site.csv", **options):
    table = Table(save(lab, text, name), target, features, **options)
    assert table.x.tolist() == [[1, 2], [3, 4]] and len(table.targets) == 2


def read_parquet(lab, column):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = lab.folder / "site.parquet"
    parquet.write_table(arrow.table({"a": column, "y": ["p", "q"]}), path)
    assert len(Table(path, "y", ["a"])) == 2


DAYS = [date(2026, 1, 1), date(2026, 1, 2)]

ROWS |= {
    "table in a file of another kind": Row(
        read_table, {"name": "site.xlsx"}, {"name": "site.csv"}, "Save the table as a CSV file."
    ),
    "table with a feature twice": Row(
        read_table, {"features": ["a", "a"]}, {"features": ["a", "b"]}, "Pass the name of each column once."
    ),
    "table with the target among the features": Row(
        read_table, {"features": ["a", "b", "y"]}, {"features": ["a", "b"]}, "Remove `y` from `features`."
    ),
    "table with a mean of another length": Row(
        read_table, {"mean": [1.0]}, {"mean": [0.0, 0.0]}, "Pass `mean=[0.0, 0.0]` to leave the features unchanged."
    ),
    "table with a deviation of zero": Row(
        read_table, {"std": [1.0, 0.0]}, {"std": [1.0, 1.0]}, "Pass `std=[1.0, 1.0]` to leave the features unchanged."
    ),
    "table with a decimal comma in a row": Row(
        read_table,
        {"text": "a,b,y\n1,2,p\n3,4,0,q\n"},
        {"text": "a,b,y\n1,2,p\n3,4.0,q\n"},
        "Write decimal numbers with a point, and put text that has commas in quotation marks.",
    ),
    "table with a missing cell": Row(
        read_table,
        {"text": "a,b,y\n1,2,p\n3,4\n"},
        {"text": "a,b,y\n1,2,p\n3,4,q\n"},
        "Add the missing cells to the row.",
    ),
    "table with a comma in text": Row(
        read_table,
        {"text": "a,b,y\n1,2,p\n3,4,q,r\n"},
        {"text": 'a,b,y\n1,2,p\n3,4,"q,r"\n'},
        "Write decimal numbers with a point, and put text that has commas in quotation marks.",
    ),
    "table with a column of days": Row(
        lambda lab, convert: read_parquet(lab, [convert(day) for day in DAYS]),
        {"convert": lambda day: day},
        {"convert": date.toordinal},
        "Convert the column to numbers or text.",
        InvalidTypeError,
    ),
    "table without a column": Row(
        read_table,
        {"features": ["a", "speed"]},
        {"features": ["a", "b"]},
        "Use the name of a column in the file.",
        UnknownNameError,
    ),
    "table with a column that has a similar name": Row(
        read_table,
        {"text": "a,speed,y\n1,2,p\n3,4,q\n", "features": ["a", "sped"]},
        {"features": ["a", "speed"]},
        "Did you mean speed?",
        UnknownNameError,
    ),
    "table with semicolons": Row(
        read_table,
        {"text": "a;b;y\n1;2;p\n3;4;q\n"},
        {"text": "a,b,y\n1,2,p\n3,4,q\n"},
        "Separate the columns by commas.",
        UnknownNameError,
    ),
    "table with a column twice": Row(
        read_table,
        {"text": "a,b,b,y\n1,2,0,p\n3,4,0,q\n"},
        {"text": "a,b,c,y\n1,2,0,p\n3,4,0,q\n"},
        "Rename or remove the duplicates.",
    ),
    "table without rows": Row(
        lambda lab, text: Table(save(lab, text), "y", ["a"]).x,
        {"text": "a,y\n"},
        {"text": "a,y\n1,p\n"},
        "Add a row.",
        MissingValueError,
    ),
    "table without a value": Row(
        read_table,
        {"text": "a,b,y\n1,2,p\n3,4,q\n5,,r\n"},
        {"text": "a,b,y\n1,2,p\n3,4,q\n"},
        "Fill in the value, or remove the row.",
        MissingValueError,
    ),
    "table with text among the features": Row(
        read_table,
        {"text": "a,b,y\n1,2,p\n3,four,q\n"},
        {"text": "a,b,y\n1,2,p\n3,4,q\n"},
        "Write a number in this cell, or use another column.",
    ),
    "table with a decimal comma in quotation marks": Row(
        read_table,
        {"text": 'a,b,y\n1,2,p\n3,"4,0",q\n'},
        {"text": "a,b,y\n1,2,p\n3,4.0,q\n"},
        "Write 4.0, with a decimal point.",
    ),
    "targets of more than 64 bits": Row(
        lambda lab, y: stream_of_arrays(lab, y=y, classes=()),
        {"y": np.ones(24, np.longdouble)},
        {"y": np.ones(24, np.longdouble).astype(np.float32)},
        "Convert `y`, for example with `y.astype(np.float32)`.",
        InvalidTypeError,
    ),
    "class with a name that UTF-8 cannot encode": Row(
        lambda lab, name: stream_of_arrays(lab, classes=["cat", "dog", "cow", name]),
        {"name": "\ud800"},
        {"name": "hen"},
        "Rename this entry in `classes`.",
    ),
    "class with the name of another one": Row(
        lambda lab, name: stream_of_arrays(lab, classes=["cat", "dog", "cow", name]),
        {"name": "cow"},
        {"name": "hen"},
        "Rename or remove the duplicates.",
    ),
}


# Rows about DataFrames and the preprocessing of tables.

FRAME = pd.DataFrame(np.random.default_rng(0).normal(size=(24, 6)), columns=[*"abcdef"])
WARD = pd.DataFrame({"age": [30.0, 50.0, 70.0], "unit": ["A", "B", "A"]})
SHARED = TableStatistics.from_frame(WARD, ["age"], ["unit"])
FIELDS = {"means": {"age": 50.0}, "stds": {"age": 20.0}, "categories": {"unit": ["A", "B"]}}


def stream_of_frame(lab, x):
    stream_of_arrays(lab, x=x, y=np.arange(24)[-len(x) :] % 4)


def summarize(lab, frame=WARD, numeric=("age",), categorical=("unit",)):
    own = TableStatistics.from_frame(frame, numeric, categorical)
    assert own.num_rows == 3


def combine(lab, statistics):
    assert TablePreprocessor.from_statistics(statistics).transform(WARD).notna().all(axis=None)


def fill_in(frame):
    """Return the table with the statistics of its own rows applied."""
    statistics = {"site": TableStatistics.from_frame(frame, [*frame.columns])}
    return TablePreprocessor.from_statistics(statistics).transform(frame).iloc[:, :6]


def read_decimal(lab, decimal):
    path = save(lab, 'age,unit\n"30,5",A\n"50,5",B\n"70,5",A\n')
    summarize(lab, pd.read_csv(path, decimal=decimal))


def read_tables(lab, features):
    path = save(lab, "a,b,y\n" + "1,2,p\n3,4,q\n" * 12)
    tables = {"first": Table(path, "y", ["a", "b"]), "second": Table(path, "y", features)}
    stream_of_data(lab, tables, classes=None)


ROWS |= {
    "frame with text": Row(
        stream_of_frame,
        {"x": FRAME.assign(f=["m", "f"] * 12)},
        {"x": pd.get_dummies(FRAME.assign(f=["m", "f"] * 12), dtype=float).drop(columns="a")},
        "Encode text and categories, for example with `pandas.get_dummies(x, dtype=float)`",
        InvalidTypeError,
        "x",
    ),
    "frame with missing values": Row(
        stream_of_frame,
        {"x": FRAME.mask(FRAME > 2)},
        {"x": fill_in(FRAME.mask(FRAME > 2))},
        "Fill in missing values, for example with `lightning_fcl.data.preprocessing.TablePreprocessor`",
        InvalidValueError,
        "x",
    ),
    "statistics of a table without a column": Row(
        summarize,
        {"frame": WARD.drop(columns="age")},
        {"frame": WARD.drop(columns="age").assign(age=float("nan"))},
        "If the table has no such values, add the column with missing values: ",
        UnknownNameError,
        "frame",
    ),
    "statistics of a table with a column twice": Row(
        summarize,
        {"frame": WARD.set_axis(["age", "age"], axis=1), "categorical": ()},
        {"frame": WARD},
        "Rename or remove the duplicates.",
    ),
    "statistics of text among numbers": Row(
        summarize,
        {"frame": WARD.assign(age=["30", "50", "old"])},
        {"frame": WARD.assign(age=pd.to_numeric(pd.Series(["30", "50", "old"]), errors="coerce"))},
        "Convert the column with `pandas.to_numeric(frame['age'], errors='coerce')`, which replaces other text by "
        "missing values, or pass `age` in `categorical`.",
        InvalidTypeError,
    ),
    "statistics of decimal commas": Row(
        read_decimal,
        {"decimal": "."},
        {"decimal": ","},
        "Read the file with `pandas.read_csv(path, decimal=',')`.",
        InvalidTypeError,
    ),
    "statistics of infinite numbers": Row(
        summarize,
        {"frame": WARD.assign(age=[1, np.inf, 2])},
        {"frame": WARD.assign(age=[1, np.inf, 2]).replace([np.inf, -np.inf], np.nan)},
        "Replace infinite numbers, for example with `frame.replace([numpy.inf, -numpy.inf], numpy.nan)`.",
    ),
    "statistics of decimal numbers as categories": Row(
        summarize,
        {"frame": WARD.assign(unit=[0.5, 1, 2])},
        {"frame": WARD.assign(unit=[0.5, 1, 2]), "numeric": ("age", "unit"), "categorical": ()},
        "Convert the column with `frame['unit'].astype(str)`, or pass `unit` in `numeric`.",
        InvalidTypeError,
    ),
    "statistics of a dict": Row(
        summarize,
        {"frame": WARD.to_dict("list")},
        {"frame": WARD},
        "Read the file of a client with `pandas.read_csv`.",
        InvalidTypeError,
    ),
    "statistics of columns with numbers as names": Row(
        summarize,
        {"frame": WARD.set_axis([0, 1], axis=1), "numeric": [0], "categorical": [1]},
        {"frame": WARD.set_axis([0, 1], axis=1).rename(columns=str), "numeric": ["0"], "categorical": ["1"]},
        'Pass lists of column names, such as `numeric=["age"]`. Rename other columns with `frame.rename(columns=str)`.',
        InvalidTypeError,
        "numeric",
    ),
    "statistics of a column in both lists": Row(
        summarize,
        {"numeric": ["age", "unit"]},
        {"numeric": ["age"]},
        "Pass the name of each column once.",
        InvalidValueError,
        "numeric",
    ),
    "statistics of huge numbers": Row(
        summarize,
        {"frame": WARD.assign(age=[1e200, 2e200, 3e200])},
        {"frame": WARD.assign(age=np.array([1e200, 2e200, 3e200]) / 1e200)},
        "If the numbers of the column are very large, divide the column first.",
        InvalidValueError,
        "squares",
    ),
    "preprocessor of no client": Row(
        combine,
        {"statistics": {}},
        {"statistics": {"site": SHARED}},
        "Pass a dict with a `TableStatistics` for each client.",
        MissingValueError,
    ),
    "preprocessor of clients with different columns": Row(
        combine,
        {"statistics": {"a": SHARED, "b": TableStatistics.from_frame(WARD, ["age"])}},
        {"statistics": {"a": SHARED, "b": TableStatistics.from_frame(WARD, ["age"], ["unit"])}},
        "Pass the same `numeric` and `categorical` to `TableStatistics.from_frame` for all clients.",
        InvalidValueError,
        "statistics",
    ),
    "preprocessor of a column without values": Row(
        combine,
        {"statistics": {"a": TableStatistics.from_frame(WARD.assign(dose=np.nan), ["age", "dose"])}},
        {"statistics": {"a": TableStatistics.from_frame(WARD.assign(dose=np.nan), ["age"])}},
        "Remove `dose` from `numeric` and `categorical`.",
        MissingValueError,
        "statistics",
    ),
    "preprocessor with a deviation of zero": Row(
        lambda lab, stds=None: TablePreprocessor(**FIELDS | {"stds": stds}) if stds else combine(lab, {"site": SHARED}),
        {"stds": {"age": 0.0}},
        None,
        "Create the preprocessor with `TablePreprocessor.from_statistics`.",
        InvalidValueError,
        "stds",
    ),
    "preprocessor with an unknown indicator": Row(
        lambda lab, indicators: TablePreprocessor(**FIELDS, indicators=indicators),
        {"indicators": ["zzz"]},
        {"indicators": TablePreprocessor.from_statistics({"site": SHARED}).indicators},
        "Create the preprocessor with `TablePreprocessor.from_statistics`.",
        UnknownNameError,
        "indicators",
    ),
    "preprocessor and an unknown category": Row(
        lambda lab, unit: TablePreprocessor(**FIELDS).transform(WARD.assign(unit=unit)),
        {"unit": ["A", "B", "C"]},
        {"unit": ["A", "B", None]},
        "Compute the statistics from tables with all categories, or replace unknown categories by None.",
        UnknownNameError,
        "frame",
    ),
    "tables with features in different orders": Row(
        read_tables,
        {"features": ["b", "a"]},
        {"features": ["a", "b"]},
        "Pass `features` in the same order to each `Table`. The order of the columns in the files may differ, because "
        "columns are found by name.",
        InvalidValueError,
        "features",
    ),
}
