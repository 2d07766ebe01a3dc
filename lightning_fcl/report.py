"""From the ``results.json`` of runs to what a reader wants: a report with plots, and tables over seeds.

Every file is written under a temporary name and then renamed, so an interrupted run leaves no half-written file.
"""

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lightning_fcl.metrics import Curve, curves, matrices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["compare_plot", "read_results", "table", "write_report", "write_table"]

Results: TypeAlias = Mapping[str, Any]
Table: TypeAlias = dict[str, dict[str, dict[str, float | None]]]

_KEYS = ("recipe", "seed", "metrics", "record", "expected", "versions", "machine", "seconds", "command")
# Okabe and Ito's palette: its colours stay apart for colour-blind readers. Yellow is left out, too faint for lines.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777")
_MARKERS = "osD^vPX*<>"
_PANELS = 4
_MEANINGS = {
    "A_gen": "accuracy on the whole test set, mean over the rounds",
    "A_per": "accuracy on all groups the client has learnt so far, mean over the rounds",
    "A_T": "accuracy on all tasks, mean over the rounds of the last task",
    "F_T": "what was lost on the earlier tasks since their best, by the means over each task's rounds",
    "final_accuracy": "accuracy on the whole test set after the last round",
    "stream_accuracy": "accuracy on the test data of all experiences so far, after the last round",
    "average_accuracy": "mean of the accuracies on all tasks after the last round",
    "forgetting": "what was lost on the earlier tasks since their best, by the last round of each task",
    "BWT": "backward transfer: change of the accuracy on a task from its last round to the end of the run",
}


def read_results(folder: str | Path) -> dict[str, Any]:
    """Read and check ``results.json`` of a run's folder.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not JSON, or an entry is missing.

    Example:
        >>> read_results("no/such/run")
        Traceback (most recent call last):
        FileNotFoundError: Expected the run's results in no/such/run/results.json but found no such file. ...
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected the run's results in {path} but found no such file. Name the folder of a finished run."
        )
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected {path} to hold JSON but got: {error}. Repeat the run.") from error
    missing = [key for key in _KEYS if not isinstance(results, dict) or key not in results]
    if missing:
        raise ValueError(f"Expected {path} to have the entries {', '.join(missing)} but they are missing.")
    return dict(results)


def write_report(folder: str | Path) -> Path:
    """Write ``report.md`` and its plots beside the ``results.json`` of a run.

    Args:
        folder: The run's folder.

    Returns:
        The path of ``report.md``.

    Raises:
        FileNotFoundError: If there is no ``results.json``.
        ValueError: If it is not JSON, or an entry is missing.

    Example:
        >>> import tempfile
        >>> run = {**dict.fromkeys(("recipe", "seed", "machine", "command")), "seconds": 1.0, "expected": {}}
        >>> run |= {"versions": {}, "metrics": {"A_gen/server": 0.5}, "record": {"tasks": {}, "rounds": []}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "results.json").write_text(json.dumps(run))
        ...     "| server | 0.500 |" in write_report(folder).read_text()
        True
    """
    folder = Path(folder)
    results = read_results(folder)
    record = results["record"]
    figures = {
        "accuracy": ("Accuracy per round", _accuracy_figure(record)),
        "matrices": ("Accuracy on each task after each task", _matrix_figure(record)),
        "traffic": ("Traffic per round", _traffic_figure(record)),
    }
    parts = [_head(results), *_against_paper(results), _metrics_section(results["metrics"])]
    for name, (title, figure) in figures.items():
        if figure is not None:
            _save(figure, folder / f"{name}.png")
            parts.append(f"## {title}\n\n![{title}]({name}.png)")
    if lines := [
        f"- round {entry['round'] + 1}, {client}: {reason}"
        for entry in record["rounds"]
        for client, reason in entry.get("dropped", {}).items()
    ]:
        parts.append("\n".join(["## Dropped clients\n", *lines]))
    return _write(folder / "report.md", "\n\n".join(parts) + "\n")


def table(results: Sequence[Results]) -> Table:
    """Mean and spread of every metric over the seeds of each recipe row.

    Args:
        results: Contents of ``results.json`` of several runs. Without a recipe, the command names the row.

    Returns:
        ``{row: {metric: {"mean", "std", "n", "paper"}}}``, rows in order of appearance. The deviation is the sample's
        (divided by n - 1), 0 for one seed. What the paper does not state is None, and so are the mean and the deviation
        of a metric that only the paper has.

    Raises:
        ValueError: If two runs have the same row and seed.

    Example:
        >>> run = {"recipe": {"paper": "flwf", "row": "FLwF"}, "metrics": {"A_gen/server": 0.5}, "expected": {}}
        >>> table([{**run, "seed": 0}, {**run, "seed": 1}])
        {'FLwF': {'A_gen/server': {'mean': 0.5, 'std': 0.0, 'n': 2, 'paper': None}}}
    """
    rows: dict[str, list[Results]] = {}
    for one in results:
        row = one["recipe"]["row"] if one["recipe"] else one["command"]
        if any(other["seed"] == one["seed"] for other in rows.get(row, [])):
            raise ValueError(f"Expected one run per row and seed but got two of {row}, seed {one['seed']}. Drop one.")
        rows.setdefault(row, []).append(one)
    return {row: _over_seeds(runs) for row, runs in rows.items()}


def write_table(
    folder: str | Path,
    table: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    metrics: Sequence[str] | None = None,
) -> tuple[Path, Path]:
    """Write ``table.json`` and ``table.md``, a line per row with cells ``ours ± std (paper)``.

    Args:
        folder: Where to write; made if need be.
        table: What `table` returns.
        metrics: Columns of ``table.md``. Default: those that the paper has, or all if it has none.

    Returns:
        The paths of ``table.json`` and ``table.md``.

    Raises:
        ValueError: If no row has one of `metrics`.

    Example:
        >>> import tempfile
        >>> rows = {"FLwF": {"A_gen/server": {"mean": 0.5, "std": 0.1, "n": 3, "paper": 0.671}}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(write_table(folder, rows)[1].read_text().splitlines()[2])
        | FLwF | 0.500 ± 0.100 (0.671) |
    """
    every = list(dict.fromkeys(name for row in table.values() for name in row))
    if unknown := sorted(set(metrics or ()) - set(every)):
        raise ValueError(f"Expected `metrics` of {', '.join(every)} but got {', '.join(unknown)}.")
    in_paper = [name for name in every if any(r.get(name, {}).get("paper") is not None for r in table.values())]
    columns = list(metrics or in_paper or every)
    lines = [[row.replace("|", "\\|"), *(_cell(name, r.get(name)) for name in columns)] for row, r in table.items()]
    note = "Mean ± standard deviation over the seeds, with the paper's value in brackets; no ± means one seed."
    markdown = f"{_markdown_table(['', *(_title(name) for name in columns)], lines)}\n\n{note}\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder / "table.json", json.dumps(table, indent=1) + "\n"), _write(folder / "table.md", markdown)


def compare_plot(folder: str | Path, results_by_label: Mapping[str, Results]) -> Path:
    """Draw runs side by side in ``compare.png``: the server's accuracy per round, final accuracy and forgetting.

    Args:
        folder: Where to write; made if need be.
        results_by_label: Contents of ``results.json`` of each run, by the name to show.

    Returns:
        The path of ``compare.png``.

    Raises:
        ValueError: If there is no run, or the server was not tested in one of them.

    Example:
        >>> import tempfile
        >>> rounds = [{"round": 0, "experience": {"server": 0}, "correct": {"server": [5, 1]}}]
        >>> record = {"groups": ["a", "b"], "totals": [10, 10], "tasks": {"server": [[0, 1]]}, "rounds": rounds}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compare_plot(folder, {"a run": {"record": record, "metrics": {"final_accuracy/server": 0.3}}}).name
        'compare.png'
    """
    if not results_by_label:
        raise ValueError("Expected `results_by_label` to have at least one run but got none.")
    every = {label: curves(results["record"]) for label, results in results_by_label.items()}
    if without := [label for label, models in every.items() if "server" not in models]:
        raise ValueError(f"Expected a record of the server in `results_by_label` but {', '.join(without)} has none.")
    figure = _figure(12, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, (label, models) in enumerate(every.items()):
        curve = models["server"]
        left.plot(curve.rounds + 1, curve.overall, label=label, **_style(index))
    longest = max(
        (results["record"] for results in results_by_label.values()), key=lambda record: len(record["rounds"])
    )
    _experiences(left, longest, "server", letters=75)
    left.set_ylim(-0.04, 1.04)
    left.set_ylabel("accuracy of the server, whole test set")
    left.grid(axis="y", alpha=0.3)
    _bars(right, {label: results["metrics"] for label, results in results_by_label.items()})
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return _save(figure, folder / "compare.png")


def _head(results: Results) -> str:
    recipe, rounds = results["recipe"], len(results["record"]["rounds"])
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    clients = len([model for model in results["record"]["tasks"] if model != "server"])
    title = f"{recipe['row']} ({recipe['paper']})" if recipe else "Run"
    return (
        f"# {title}\n\n- Command: `{results['command']}`\n- Seed: {results['seed']}\n"
        f"- Extent: {rounds} rounds, {clients} clients\n- Time: {results['seconds']:.1f} s\n"
        f"- Machine: {results['machine']}\n- Versions: {versions}"
    )


def _against_paper(results: Results) -> list[str]:
    ours, lines = results["metrics"], []
    for name, paper in results["expected"].items():
        difference = f"{ours[name] - paper:+.3f}" if name in ours else "-"
        lines.append([_title(name), _number(name, ours.get(name)), _number(name, paper), difference])
    if not lines:
        return []
    return [f"## Against the paper\n\n{_markdown_table(['metric', 'ours', 'paper', 'difference'], lines)}"]


def _metrics_section(metrics: Mapping[str, float]) -> str:
    """All metrics, a line per model and a column per metric, then what they mean."""
    pairs = [name.rpartition("/")[::2] for name in metrics]
    kinds = list(dict.fromkeys(kind for kind, model in pairs if model != "total"))
    models = sorted(
        dict.fromkeys(model for _, model in pairs if model != "total"),
        key=lambda model: {"server": 0, "clients": 1}.get(model, 2),
    )
    lines = [[_model_name(m), *(_number(k, metrics.get(f"{k}/{m}")) for k in kinds)] for m in models]
    traffic = [
        f"{way}: {_number(n, metrics[n])}" for way in ("upload", "download") if (n := f"{way}_bytes/total") in metrics
    ]
    # A_5 and F_5 are explained as A_T and F_T.
    meanings = {kind: _MEANINGS.get(f"{kind[0]}_T" if kind[2:].isdigit() else kind) for kind in kinds}
    notes = [f"- `{kind}`: {meaning}" for kind, meaning in meanings.items() if meaning]
    total = [f"Traffic of all clients and rounds: {', '.join(traffic)}."] if traffic else []
    return "\n\n".join(["## Metrics", _markdown_table(["model", *kinds], lines), *total, "\n".join(notes)])


def _over_seeds(runs: Sequence[Results]) -> dict[str, dict[str, float | None]]:
    row: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(name for run in runs for name in (*run["metrics"], *run["expected"])):
        values = [run["metrics"][name] for run in runs if name in run["metrics"]]
        row[name] = {
            "mean": float(np.mean(values)) if values else None,
            "std": (float(np.std(values, ddof=1)) if len(values) > 1 else 0.0) if values else None,
            "n": len(values),
            "paper": next((run["expected"][name] for run in runs if name in run["expected"]), None),
        }
    return row


def _cell(name: str, entry: Mapping[str, float | None] | None) -> str:
    if entry is None:
        return "-"
    spread = f" ± {_number(name, entry['std'])}" if (entry["n"] or 0) > 1 else ""
    paper = f" ({_number(name, entry['paper'])})" if entry["paper"] is not None else ""
    return _number(name, entry["mean"]) + spread + paper


def _title(name: str) -> str:
    metric, _, model = name.rpartition("/")
    return f"{metric} {model}".strip().replace("|", "\\|")


def _model_name(model: str) -> str:
    names = {"clients": "mean of the clients"}
    return names.get(model, f"client {model}" if model.isdigit() else model).replace("|", "\\|")


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.3f} MB" if "_bytes" in name else f"{value:.3f}"


def _markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def _figure(width: float, height: float) -> "Figure":
    # A bare Figure is drawn by Agg and, unlike pyplot, touches neither a display nor global state.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    return Figure(figsize=(width, height), dpi=110, layout=margins)


def _accuracy_figure(record: Mapping[str, Any]) -> "Figure | None":
    """A panel per model with a line per group, as in figures 2 and 3 of Usmanova et al. 2021."""
    models = dict(list(curves(record).items())[:_PANELS])
    if not models:
        return None
    columns, names = min(2, len(models)), record["groups"]
    rows = -(-len(models) // columns)
    figure = _figure(12, 3.6 * rows + 0.3)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel in panels.flat[len(models) :]:
        panel.set_axis_off()
    for panel, (model, curve) in zip(panels.flat, models.items(), strict=False):
        # More lines than markers would be a tangle.
        draw = _lines if len(names) <= len(_MARKERS) else _heat
        draw(panel, curve, names)
        _experiences(panel, record, model, letters=120 // columns)
        panel.set_title(_model_name(model), fontweight="bold", loc="left", pad=28)
    if len(names) <= len(_MARKERS):
        figure.legend(
            *panels[0, 0].get_legend_handles_labels(), loc="outside right upper", title="group", frameon=False
        )
    else:
        figure.colorbar(panels[0, 0].images[0], ax=panels, label="accuracy", shrink=0.8)
    return figure


def _lines(panel: "Axes", curve: Curve, names: Sequence[str]) -> None:
    for group, name in enumerate(names):
        panel.plot(curve.rounds + 1, curve.accuracy[:, group], label=name, **_style(group))
    panel.plot(curve.rounds + 1, curve.overall, color="black", linestyle=":", linewidth=2, label="whole test set")
    panel.set_ylim(-0.04, 1.04)
    panel.grid(axis="y", alpha=0.3)
    panel.set_ylabel("accuracy")


def _heat(panel: "Axes", curve: Curve, names: Sequence[str]) -> None:
    first, last = int(curve.rounds[0]), int(curve.rounds[-1])
    grid = np.full((len(names), last - first + 1), np.nan)
    grid[:, curve.rounds - first] = curve.accuracy.T
    extent = (first + 0.5, last + 1.5, -0.5, len(names) - 0.5)
    panel.imshow(grid, extent=extent, origin="lower", aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    panel.set_ylabel("group")
    if len(names) <= 25:
        panel.set_yticks(range(len(names)), names, fontsize=7)


def _experiences(panel: "Axes", record: Mapping[str, Any], model: str, letters: int) -> None:
    """Mark where the model's experiences begin, and write above each which groups are then learnt."""
    entries = [entry for entry in record["rounds"] if model in entry["experience"]]
    rounds = [entry["round"] + 1 for entry in entries]
    numbers = [entry["experience"][model] for entry in entries]
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    edges = [*(rounds[start] - 0.5 for start in starts), rounds[-1] + 0.5]
    for edge in edges[1:-1]:
        panel.axvline(edge, color="white" if panel.images else "0.35", linestyle="--", linewidth=1)
    for start, left, right in zip(starts, edges, edges[1:], strict=False):
        if numbers[start] >= len(record["tasks"][model]):
            continue  # the other clients have more tasks: this one has finished
        names = [record["groups"][group] for group in record["tasks"][model][numbers[start]]]
        text = _task_label(numbers[start], names, int(letters * (right - left) / (edges[-1] - edges[0])))
        position = ((left + right) / 2, 1.02)
        panel.text(*position, text, transform=panel.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
    panel.set_xlim(edges[0], edges[-1])
    panel.locator_params(axis="x", integer=True)
    panel.set_xlabel("round")


def _task_label(number: int, names: Sequence[str], letters: int) -> str:
    """The names of a task's groups, or else how many, or else only the task's number: what fits."""
    for text in (", ".join(names), f"task {number + 1} ({len(names)} groups)"):
        lines = textwrap.wrap(text, max(letters, 1), break_long_words=False)
        # Wrapping "0, 1" would save no room worth having.
        if max(map(len, lines), default=0) <= letters and len(lines) <= (2 if letters >= 12 else 1):
            return "\n".join(lines)
    return str(number + 1)


def _matrix_figure(record: Mapping[str, Any]) -> "Figure | None":
    """A heat map per model with several tasks: accuracy on task d after task t."""
    models = dict(list(matrices(record).items())[:_PANELS])
    if not models:
        return None
    columns = min(2, len(models))
    rows = -(-len(models) // columns)
    figure = _figure(8.2, 5.6) if columns == 1 else _figure(12, 4.6 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat[len(models) :]:
        panel.set_axis_off()
    for panel, (model, matrix) in zip(panels.flat, models.items(), strict=False):
        image = panel.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
        size = len(matrix)
        for (t, d), value in np.ndenumerate(matrix) if size <= 10 else ():
            colour = "white" if value < 0.6 else "black"
            panel.text(d, t, "-" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color=colour)
        # Right of this staircase the task has not been learnt yet.
        panel.step(np.arange(size) + 0.5, np.arange(size) - 0.5, where="pre", color="white", linewidth=2)
        labels = [
            _task_label(t, [record["groups"][g] for g in record["tasks"][model][t]], 60 // size) for t in range(size)
        ]
        shown = range(0, size, 1 + size // 20)
        panel.set_xticks(shown, [labels[t] for t in shown], fontsize=8)
        panel.set_yticks(shown, [labels[t] for t in shown], fontsize=8)
        panel.set(xlabel="accuracy on task", ylabel="after task")
        panel.set_title(_model_name(model), fontweight="bold")
    figure.colorbar(image, ax=panels, label="accuracy, mean over the task's rounds", shrink=0.8)
    return figure


def _traffic_figure(record: Mapping[str, Any]) -> "Figure | None":
    """Megabytes of all clients together, up and down, per round."""
    rounds = np.array([entry["round"] + 1 for entry in record["rounds"]])
    ways = ("upload", "download")
    sums = [[sum(entry.get(f"{way}_bytes", {}).values()) / 1e6 for entry in record["rounds"]] for way in ways]
    if not np.any(sums):
        return None
    figure = _figure(10, 3.2)
    panel = figure.subplots()
    for index, (way, megabytes) in enumerate(zip(ways, sums, strict=True)):
        label, colour = f"{way}s of all clients", _COLOURS[index]
        if len(rounds) <= 40:
            panel.bar(rounds + 0.4 * index - 0.2, megabytes, width=0.38, color=colour, label=label)
        else:
            panel.plot(rounds, megabytes, color=colour, linestyle=("-", "--")[index], label=label)
    panel.locator_params(axis="x", integer=True)
    panel.set_xlim(rounds[0] - 0.7, rounds[-1] + 0.7)
    panel.set_ylim(0, 1.05 * np.max(sums))
    panel.set(xlabel="round", ylabel="MB per round (1 MB = 10⁶ bytes)")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _bars(panel: "Axes", metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Final accuracy and forgetting of the server, a bar per run."""
    names = ("final_accuracy", "forgetting")
    width = 0.8 / len(metrics)
    for index, (label, values) in enumerate(metrics.items()):
        for position, name in enumerate(names):
            value = values.get(f"{name}/server")
            x = position + (index - (len(metrics) - 1) / 2) * width
            panel.bar(
                x, value or 0, width=0.92 * width, color=_style(index)["color"], label=label if not position else None
            )
            text = "n/a" if value is None else f"{value:.2f}"
            panel.annotate(text, (x, max(value or 0, 0)), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(names)), ["final accuracy\n(higher is better)", "forgetting\n(lower is better)"])
    panel.set_ylabel("server, test set")
    panel.margins(y=0.1)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": "-" if index < len(_COLOURS) else "--",
        "markersize": 4.5,
        "linewidth": 1.6,
        "alpha": 0.9,
    }


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place only if all goes well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, text: str) -> Path:
    with _replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _save(figure: "Figure", path: Path) -> Path:
    with _replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path
