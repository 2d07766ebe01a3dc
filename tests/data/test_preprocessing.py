"""Tests of the preprocessing of tables: statistics of clients, imputation, standardization and encoding."""

import json
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from raising import raises
from sklearn.impute import MissingIndicator
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from lightning_fcl.data.preprocessing import TablePreprocessor, TableStatistics
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError, UnknownNameError

NUMERIC, CATEGORICAL = ["age", "weight", "year", "smoker"], ["unit", "code"]


def make_table(rows, seed):
    """Return a table with missing values in each column except `year`. The mean of `year` is large."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "id": np.arange(rows),
            "age": rng.normal(50 + seed, 10, rows),
            "unit": rng.choice(["A", "B", f"C{seed}"], rows),
            "weight": rng.lognormal(4, 1, rows),
            "year": rng.integers(1_700_000_000, 1_700_000_100, rows),
            "code": pd.array(rng.integers(0, 3, rows), dtype="Int64"),
            "smoker": pd.array(rng.random(rows) < 0.3, dtype="boolean"),
        }
    )
    for name in ("age", "weight", "unit", "code", "smoker"):
        table.loc[rng.random(rows) < 0.2, name] = pd.NA if name in ("code", "smoker") else np.nan
    return table


@pytest.fixture
def tables():
    return {f"site-{seed}": make_table(40 + 7 * seed, seed) for seed in range(3)}


def fitted(tables, numeric=NUMERIC, categorical=CATEGORICAL):
    return TablePreprocessor.from_statistics(
        {site: TableStatistics.from_frame(table, numeric, categorical) for site, table in tables.items()}
    )


def test_preprocessor_of_clients_equals_scikit_learn_on_pooled_rows(tables):
    pooled = pd.concat(tables.values(), ignore_index=True)
    numbers = pooled[NUMERIC].astype("float64")
    texts = pooled[CATEGORICAL].astype("object").map(lambda cell: "missing" if pd.isna(cell) else str(cell))
    encoder = OneHotEncoder(sparse_output=False)
    scaled = StandardScaler().fit_transform(numbers)
    encoded = encoder.fit_transform(texts)
    kept = [not name.endswith("_missing") for name in encoder.get_feature_names_out()]
    marks = MissingIndicator(features="all").fit_transform(numbers)[:, [name != "year" for name in NUMERIC]]
    wanted = [np.nan_to_num(scaled), encoded[:, kept], marks, texts.to_numpy() == "missing"]
    found = fitted(tables).transform(pooled)
    np.testing.assert_allclose(found.to_numpy(), np.hstack(wanted), rtol=1e-5, atol=1e-5)
    assert found.dtypes.unique().tolist() == [np.float32]


def test_preprocessor_of_one_row_per_client_equals_pooled_statistics(tables):
    pooled = pd.concat(tables.values(), ignore_index=True)
    split = {str(number): pooled.iloc[[number]] for number in range(len(pooled))}
    whole, parts = fitted({"all": pooled}), fitted(split)
    assert (whole.categories, whole.indicators) == (parts.categories, parts.indicators)
    for name in NUMERIC:
        np.testing.assert_allclose(parts.means[name], whole.means[name], rtol=1e-12)
        np.testing.assert_allclose(parts.stds[name], whole.stds[name], rtol=1e-9)


def test_preprocessor_does_not_depend_on_order_of_columns_clients_and_rows(tables):
    preprocessor, table = fitted(tables), tables["site-1"]
    shuffled = table.sample(frac=1, random_state=0)[table.columns[::-1]]
    expected = preprocessor.transform(table).loc[shuffled.index]
    pd.testing.assert_frame_equal(preprocessor.transform(shuffled), expected)
    other = fitted(dict(reversed(tables.items())))
    assert other.features == preprocessor.features
    np.testing.assert_allclose([*other.stds.values()], [*preprocessor.stds.values()], rtol=1e-12)


def test_preprocessor_fields_survive_json(tables):
    statistics = {site: TableStatistics.from_frame(table, NUMERIC, CATEGORICAL) for site, table in tables.items()}
    sent = {site: TableStatistics(**json.loads(json.dumps(asdict(own)))) for site, own in statistics.items()}
    assert sent == statistics
    preprocessor = TablePreprocessor.from_statistics(sent)
    assert TablePreprocessor(**json.loads(json.dumps(asdict(preprocessor)))) == preprocessor


def test_statistics_count_missing_values(tables):
    for table in tables.values():
        own = TableStatistics.from_frame(table, NUMERIC, CATEGORICAL)
        assert own.missing == table[[*NUMERIC, *CATEGORICAL]].isna().sum().to_dict()
        assert own.num_rows == len(table)


@pytest.mark.parametrize("value", [0.1, 0.0, -3e8, 1e-300])
def test_preprocessor_constant_column_becomes_zero(value):
    tables = {str(rows): pd.DataFrame({"x": [value] * rows}) for rows in (1, 7, 1001)}
    preprocessor = fitted(tables, ["x"], [])
    assert preprocessor.stds == {"x": 1.0}
    np.testing.assert_allclose(preprocessor.transform(tables["7"]), 0, atol=1e-6)


def test_preprocessor_small_deviations_from_large_mean_are_kept():
    values = 1e8 + np.array([0.0, 1.0, 2.0, 3.0])
    tables = {"a": pd.DataFrame({"x": values[:1]}), "b": pd.DataFrame({"x": values[1:]})}
    assert fitted(tables, ["x"], []).stds["x"] == pytest.approx(np.std([0, 1, 2, 3]), rel=1e-6)


def test_preprocessor_column_without_values_at_one_client_is_imputed(tables):
    tables["site-0"]["age"] = np.nan
    preprocessor = fitted(tables)
    others = pd.concat([tables["site-1"], tables["site-2"]])["age"]
    assert preprocessor.means["age"] == pytest.approx(others.mean())
    found = preprocessor.transform(tables["site-0"])
    assert (found["age"] == 0).all() and (found["age is missing"] == 1).all()


def test_preprocessor_whole_numbers_with_and_without_decimal_point_are_one_category():
    tables = {"a": pd.DataFrame({"code": [1, 2]}), "b": pd.DataFrame({"code": [1.0, None]})}
    assert fitted(tables, [], ["code"]).features == ["code=1", "code=2", "code is missing"]


def test_preprocessor_client_without_rows_changes_nothing(tables):
    expected = fitted(tables)
    assert fitted({"empty": make_table(40, 0).iloc[:0], **tables}) == expected
    assert expected.transform(tables["site-0"].iloc[:0]).shape == (0, len(expected.features))


FRAME = pd.DataFrame({"x": [1.0, 2.0], "text": ["a", "b"], "day": pd.to_datetime(["2020-01-01", "2020-01-02"])})


@pytest.mark.parametrize(
    ("frame", "numeric", "categorical", "kind"),
    [
        ({"x": [1.0]}, ["x"], [], InvalidTypeError),
        (FRAME, ["text"], [], InvalidTypeError),
        (FRAME, ["day"], [], InvalidTypeError),
        (FRAME, [], ["day"], InvalidTypeError),
        (FRAME.assign(x=[1.5, 2]), [], ["x"], InvalidTypeError),
        (FRAME.assign(x=[1j, 2]), ["x"], [], InvalidTypeError),
        (FRAME.assign(x=[np.inf, 2]), ["x"], [], InvalidValueError),
        (FRAME, ["y"], [], UnknownNameError),
        (pd.concat([FRAME, FRAME], axis=1), ["x"], [], InvalidValueError),
    ],
)
def test_statistics_invalid_table_raises(frame, numeric, categorical, kind):
    with raises(kind, "frame"):
        TableStatistics.from_frame(frame, numeric, categorical)
    if isinstance(frame, pd.DataFrame):
        preprocessor = TablePreprocessor(
            dict.fromkeys(numeric, 0.0), dict.fromkeys(numeric, 1.0), {n: [] for n in categorical}
        )
        with raises(kind, "frame"):
            preprocessor.transform(frame)


def test_statistics_error_names_cell_that_is_no_number():
    frame = pd.DataFrame({"x": ["1", "2", "fast"]}, index=["p", "q", "r"])
    with pytest.raises(InvalidTypeError, match=r"column `x` .*'fast' in the row with index r"):
        TableStatistics.from_frame(frame, ["x"])


@pytest.mark.parametrize(
    ("numeric", "categorical", "kind"),
    [
        ("x", [], InvalidTypeError),
        ([1], [], InvalidTypeError),
        ([], [], InvalidValueError),
        (["x", "x"], [], InvalidValueError),
        (["x"], ["x"], InvalidValueError),
    ],
)
def test_statistics_invalid_columns_raise(numeric, categorical, kind):
    with raises(kind, "numeric"):
        TableStatistics.from_frame(FRAME, numeric, categorical)


def test_statistics_infinite_sum_raises():
    with raises(InvalidValueError, "squares"):
        TableStatistics.from_frame(pd.DataFrame({"x": [1.0, 1e200]}), ["x"])


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": {"x": 3}},
        {"counts": {}},
        {"means": {}},
        {"squares": {"x": -1.0}},
        {"means": {"x": float("inf")}},
        {"categories": {"c": {"a": 2, "b": 1}}},
        {"categories": {"c": {"a": -1}}},
    ],
)
def test_statistics_impossible_numbers_raise(changes):
    valid = {
        "num_rows": 2,
        "counts": {"x": 2},
        "means": {"x": 1.0},
        "squares": {"x": 0.5},
        "categories": {"c": {"a": 2}},
    }
    assert TableStatistics(**valid)
    with raises(InvalidValueError, "squares"):
        TableStatistics(**{**valid, **changes})


def test_preprocessor_different_or_empty_statistics_raise():
    one, other = (TableStatistics.from_frame(FRAME, ["x"], categorical) for categorical in ([], ["text"]))
    for statistics in ({"a": one, "b": other}, {"b": other, "a": one}):
        with raises(InvalidValueError, "statistics", value="text"):
            TablePreprocessor.from_statistics(statistics)
    with raises(MissingValueError, "statistics"):
        TablePreprocessor.from_statistics({})
    empty = TableStatistics.from_frame(FRAME.assign(x=np.nan, text=None), ["x"], ["text"])
    with raises(MissingValueError, "statistics", value=["x", "text"]):
        TablePreprocessor.from_statistics({"a": empty})


def test_preprocessor_unknown_category_raises():
    preprocessor = fitted({"a": FRAME}, ["x"], ["text"])
    with raises(UnknownNameError, "frame", value=["c"]):
        preprocessor.transform(FRAME.assign(text=["a", "c"]))


@pytest.mark.parametrize(
    ("changes", "kind", "argument"),
    [
        ({"stds": {"x": 0.0}}, InvalidValueError, "stds"),
        ({"stds": {}}, InvalidValueError, "stds"),
        ({"stds": {"x": 1.0, "y": 1.0}}, InvalidValueError, "stds"),
        ({"means": {"x": float("inf")}}, InvalidValueError, "stds"),
        ({"indicators": ["y"]}, UnknownNameError, "indicators"),
        ({"categories": {"x": ["a"]}}, InvalidValueError, "numeric"),
    ],
)
def test_preprocessor_invalid_fields_raise(changes, kind, argument):
    with raises(kind, argument):
        TablePreprocessor(**{"means": {"x": 1.0}, "stds": {"x": 1.0}, **changes})
