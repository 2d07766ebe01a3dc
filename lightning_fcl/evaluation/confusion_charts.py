"""Charts of confusion matrices in the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import Points, Spec, responsive_chart
from lightning_fcl.evaluation.confusion import Confusion, class_names, confusions
from lightning_fcl.evaluation.record import Record
from lightning_fcl.evaluation.summary import experience_labels

# Maximum number of classes of a chart. A cell would be smaller than 3 pixels with more classes.
_CLASSES = 250
# Maximum number of clients that the list of models contains.
_CLIENTS = 10
# Maximum number of entries of all matrices in one chart.
_ENTRIES = 100_000
# Maximum number of classes for which the cells contain numbers.
_WITH_NUMBERS = 12
# Maximum number of experiences in one chart, and the size of their matrices in pixels.
_MULTIPLES, _SIZE = 12, 150
# The color of the value 0 in the color scheme "viridis".
_ZERO = "#440154"


def confusion_chart(record: Record) -> Spec | None:
    """Return the chart of the selected model's confusion matrix after the selected experience.

    The list of models contains the server and, if they are few, the clients. The result is None if the record has no
    matrices, or for more than 250 classes.
    """
    matrices, names = _shown_matrices(record)
    if not matrices:
        return None
    models = list(dict.fromkeys(model for model, _ in matrices))
    experiences = sorted({experience for _, experience in matrices})
    last = max(experience for model, experience in matrices if model == models[0])
    # Labels below the chart overlap if all of them together are longer than about 80 characters.
    angle = -90 if sum(map(len, names)) > 80 else 0
    base = _cells().encode(
        x=alt.X("prediction:O", title="prediction", scale=_class_scale(names), axis=_class_axis(angle)),
        y=alt.Y("target:O", title="target", scale=_class_scale(names), axis=_class_axis()),
    )
    layers = [base.mark_rect()]
    if len(names) <= _WITH_NUMBERS:
        ink = alt.condition("datum.share < 0.4", alt.value("white"), alt.value("black"))
        layers.append(base.mark_text().encode(text="count:Q", color=ink))
    labels = _experience_labels(record, experiences)
    options = alt.binding_select(options=experiences, labels=labels, name="experience ")
    selected_experience = alt.param(name="after", value=last, bind=options if len(experiences) > 1 else alt.Undefined)
    layered = alt.layer(*layers, view=alt.ViewBackground(fill=_ZERO))
    chart = charts.with_model_selector(layered, models).transform_filter("datum.experience == after")
    chart = _with_shares(chart).add_params(selected_experience, _names_param(names))
    return responsive_chart(chart, max(180, min(680, 30 * len(names))), matrices=_rows(matrices))


def confusion_history_chart(record: Record) -> Spec | None:
    """Return the charts of the server's confusion matrices after each experience.

    The result is None for a single experience, for more than 12 experiences, and for more than 250 classes.
    """
    all_matrices, names = _shown_matrices(record)
    matrices = {key: matrix for key, matrix in all_matrices.items() if key[0] == "server"}
    if not 1 < len(matrices) <= _MULTIPLES:
        return None
    labels = _experience_labels(record, [experience for _, experience in matrices])
    rows = [{**row, "label": label} for row, label in zip(_rows(matrices), labels, strict=True)]
    cells = (
        _with_shares(_cells())
        .mark_rect()
        .encode(
            x=alt.X("prediction:O", scale=_class_scale(names), axis=None),
            y=alt.Y("target:O", scale=_class_scale(names), axis=None),
        )
        .properties(width=_SIZE, height=_SIZE, view=alt.ViewBackground(fill=_ZERO))
    )
    header = alt.Header(labelLimit=_SIZE, labelColor="#888888")
    faceted = cells.facet(facet=alt.Facet("label:N", sort=labels, title=None, header=header), columns=5)
    return charts.spec(faceted.add_params(_names_param(names)), matrices=rows)


def _shown_matrices(record: Record) -> tuple[dict[tuple[str, int], Confusion], list[str]]:
    """Return the matrices that a chart can show, by model and experience, and the names of the classes.

    If there are too many clients or entries, the matrices of clients are left out. If the matrices of the server have
    too many entries, those of the first experiences are left out.
    """
    matrices = confusions(record)
    largest = max((max(entry[:2]) for matrix in matrices.values() for entry in matrix), default=-1)
    names = class_names(record, largest + 1)
    num_clients = len({model for model, _ in matrices} - {"server"})
    if num_clients > _CLIENTS or sum(map(len, matrices.values())) > _ENTRIES:
        matrices = {key: matrix for key, matrix in matrices.items() if key[0] == "server"}
    while len(matrices) > 1 and sum(map(len, matrices.values())) > _ENTRIES:
        del matrices[min(matrices, key=lambda key: key[1])]
    return matrices if len(names) <= _CLASSES else {}, names


def _experience_labels(record: Record, experiences: Sequence[int]) -> list[str]:
    labels = experience_labels([record])
    return [labels[experience] for experience in experiences]


def _rows(matrices: Mapping[tuple[str, int], Confusion]) -> Points:
    """Return a row for each matrix. Lists of entries need less space in a page than one row for each entry."""
    return [
        {"model": model, "experience": experience}
        | {name: [entry[i] for entry in matrix] for i, name in enumerate(("target", "prediction", "count"))}
        for (model, experience), matrix in matrices.items()
    ]


def _cells() -> alt.Chart:
    """Return a chart of the entries of matrices. The color is the share of the samples of a class."""
    shares = alt.Scale(type="sqrt", scheme="viridis", domain=[0, 1])
    tips = charts.make_tooltips(target_name="target", prediction_name="prediction", count="samples", share="")
    return charts.get_chart("matrices").encode(
        color=alt.Color("share:Q", title="share of the class", scale=shares, legend=alt.Legend(gradientLength=120)),
        tooltip=tips,
    )


def _with_shares(chart: charts.Chart) -> charts.Chart:
    """Return a chart with one row for each entry of its matrices, with the names of the classes and the share."""
    return (
        chart.transform_flatten(["target", "prediction", "count"])
        .transform_joinaggregate(total="sum(count)", groupby=["model", "experience", "target"])
        .transform_calculate(
            share="datum.count / datum.total",
            target_name="class_names[datum.target]",
            prediction_name="class_names[datum.prediction]",
        )
    )


def _names_param(names: Sequence[str]) -> alt.Parameter:
    """Return the parameter with the names of the classes, so that each entry contains only the numbers."""
    return alt.param(name="class_names", value=[*names])


def _class_scale(names: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=[*range(len(names))])


def _class_axis(angle: int = 0) -> alt.Axis:
    return alt.Axis(labelExpr="class_names[datum.value]", labelOverlap=True, labelAngle=angle)
