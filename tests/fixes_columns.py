"""Table of hints in the error messages of tables and targets."""

from datetime import date

import numpy as np
import pytest
from fixes import Row, stream_of_arrays

from lightning_fcl.data.tables import Table
from lightning_fcl.errors import InvalidTypeError, MissingValueError, UnknownNameError

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
