"""From the ``results.json`` of runs to what a reader wants: a report with plots."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightning_fcl.evaluation.files import save_figure, write_whole
from lightning_fcl.evaluation.markdown import markdown_table
from lightning_fcl.evaluation.metrics import quantity
from lightning_fcl.evaluation.panels import density_figure, stream_accuracy_figure
from lightning_fcl.evaluation.plots import accuracy_figure, compare_figure, matrix_figure, model_name, traffic_figure
from lightning_fcl.evaluation.results import read_results, seal
from lightning_fcl.evaluation.rounds import write_csv
from lightning_fcl.evaluation.table import metric_number, metric_title

__all__ = ["compare_plot", "write_files", "write_report"]

Results: TypeAlias = Mapping[str, Any]

_MEANINGS = {
    "A_gen": "accuracy on the whole test set, mean over the rounds",
    "A_per": "accuracy on all groups the client has learnt so far, mean over the rounds",
    "A_T": "accuracy on all tasks, mean over the rounds of the last task",
    "F_T": "what was lost on the earlier tasks since their best, by the means over each task's rounds",
    "final_accuracy": "accuracy on the whole test set after the last round",
    "stream_accuracy": "accuracy on the test data of all experiences so far, after the last round",
    "average_accuracy": "mean of the accuracies on all tasks after the last round",
    "forgetting": "what was lost on the earlier tasks since their best, by the last round of each task",
    "learning_accuracy": "accuracy on a task after its last round, mean over tasks",
    "kept_bytes": "what stays with a client between rounds, when the run ends",
    "BWT": "backward transfer: change of the accuracy on a task from its last round to the end of the run",
}
_MEASURED = {
    "general": "on the whole test set, mean over the rounds",
    "personal": "on all groups the client has learnt so far, mean over the rounds",
    "final": "on the whole test set after the last round",
    "stream": "on the test data of all experiences so far, after the last round",
    "average": "mean over the tasks after the last round",
    "learning": "on a task after its last round, mean over tasks",
    "forgetting": "what was lost on the earlier tasks since their best, by the last round of each task: above 0",
    "BWT": "backward transfer: what was gained on a task from its last round to the end of the run; below 0 if lost",
    "training": "on all samples that clients have trained on, after the last round",
}


def write_report(folder: str | Path) -> Path:
    """Write ``report.md`` and its plots beside the ``results.json`` of a run.

    Args:
        folder: The run's folder.

    Returns:
        The path of ``report.md``.

    Raises:
        FileNotFoundError: If there is no ``results.json``.
        ValueError: If it is not understood: see `lightning_fcl.evaluation.results.read_results`.

    Example:
        >>> import tempfile
        >>> from lightning_fcl.evaluation.results import write_results
        >>> run = {**dict.fromkeys(("recipe", "seed", "machine", "command")), "seconds": 1.0, "expected": {}}
        >>> run |= {"versions": {}, "metrics": {"A_gen/server": 0.5}, "record": {"tasks": {}, "rounds": []}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_results(folder, run | {"finished": True})
        ...     "| server | 0.500 |" in write_report(folder).read_text()
        True
    """
    folder = Path(folder)
    results = read_results(folder)
    record = results["record"]
    of = quantity(record)
    title = of[0].upper() + of[1:]
    figures = {
        "accuracy": (f"{title} per round", accuracy_figure(record)),
        "matrices": (f"{title} on each task after each task", matrix_figure(record)),
        "stream_accuracy": (f"Stream {of} after each experience", stream_accuracy_figure(record)),
        "densities": (
            "Density of the reservoir's activations on the test samples after each experience",
            density_figure(results["densities"], record) if "densities" in results else None,
        ),
        "traffic": ("Traffic per round", traffic_figure(record)),
    }
    parts = [_head(results), *_against_paper(results), _metrics_section(results["metrics"], record)]
    for name, (title, figure) in figures.items():
        if figure is not None:
            save_figure(figure, folder / f"{name}.png")
            parts.append(f"## {title}\n\n![{title}]({name}.png)")
    if lines := [
        f"- round {entry['round'] + 1}, {client}: {reason}"
        for entry in record["rounds"]
        for client, reason in entry.get("dropped", {}).items()
    ]:
        parts.append("\n".join(["## Dropped clients\n", *lines]))
    if lines := [f"- round {e['round'] + 1}, {client}" for e in record["rounds"] for client in e.get("diverged", [])]:
        parts.append("\n".join(["## Clients whose loss was not finite\n", *lines]))
    return write_whole(folder / "report.md", "\n\n".join(parts) + "\n")


def write_files(folder: str | Path) -> None:
    """Write all that a run's folder has beside ``results.json``: ``metrics.csv``, the report, and last the seal.

    A run that was stopped before its end gets no seal.

    Args:
        folder: The run's folder.

    Raises:
        FileNotFoundError: If there is no ``results.json``.
        ValueError: If it is not understood.
    """
    folder = Path(folder)
    results = read_results(folder)
    table, report = write_csv(folder / "metrics.csv", results["record"]), write_report(folder)
    figures = [folder / name for name in re.findall(r"]\((\w+\.png)\)", report.read_text(encoding="utf-8"))]
    if results["finished"]:
        seal(folder, [folder / "results.json", table, report, *figures])


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
    figure = compare_figure(results_by_label)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return save_figure(figure, folder / "compare.png")


def _head(results: Results) -> str:
    recipe, rounds = results["recipe"], len(results["record"]["rounds"])
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    clients = len([model for model in results["record"]["tasks"] if model != "server"])
    title = recipe["row"] if recipe else "Run"
    instead = results.get("measured_on") == "validation"
    stopped = "" if results["finished"] else "; the run was stopped before its end"
    measured = "- Measured on the validation samples in place of the test set\n" if instead else ""
    if recipe and recipe["paper"]:
        title += f" ({recipe['paper']})"
    return (
        f"# {title}\n\n- Command: `{results['command']}`\n- Seed: {results['seed']}\n"
        f"- Extent: {rounds} rounds, {clients} clients{stopped}\n{measured}- Time: {results['seconds']:.1f} s\n"
        f"- Machine: {results['machine']}\n- Versions: {versions}"
    )


def _against_paper(results: Results) -> list[str]:
    ours, lines = results["metrics"], []
    for name, paper in results["expected"].items():
        difference = f"{ours[name] - paper:+.3f}" if name in ours else "-"
        lines.append([metric_title(name), metric_number(name, ours.get(name)), metric_number(name, paper), difference])
    if not lines:
        return []
    return [f"## Against the paper\n\n{markdown_table(['metric', 'ours', 'paper', 'difference'], lines)}"]


def _metrics_section(metrics: Mapping[str, float], record: Mapping[str, Any]) -> str:
    """All metrics, a line per model and a column per metric, then what they mean."""
    pairs = [name.rpartition("/")[::2] for name in metrics]
    kinds = list(dict.fromkeys(kind for kind, model in pairs if model != "total"))
    models = sorted(
        dict.fromkeys(model for _, model in pairs if model != "total"),
        key=lambda model: {"server": 0, "clients": 1}.get(model, 2),
    )
    lines = [[model_name(m), *(metric_number(k, metrics.get(f"{k}/{m}")) for k in kinds)] for m in models]
    traffic = [
        f"{way}: {metric_number(n, metrics[n])}"
        for way in ("upload", "download")
        if (n := f"{way}_bytes/total") in metrics
    ]
    # A_5 and F_5 are explained as A_T and F_T.
    meanings = {kind: _MEANINGS.get(f"{kind[0]}_T" if kind[2:].isdigit() else kind) for kind in kinds}
    for one in record.get("measures", []):
        way = "higher" if one["higher_is_better"] else "lower"
        meanings |= {f"{k}_{one['name']}": f"{one['name']} ({way} is better) {what}" for k, what in _MEASURED.items()}
    own = ", of the client's own model: after its last local training of each task, before aggregation"
    meanings |= {f"{kind}_own": f"{meaning}{own}" for kind, meaning in meanings.items() if meaning}
    meanings = {kind: meanings.get(kind) for kind in kinds}
    notes = [f"- `{kind}`: {meaning}" for kind, meaning in meanings.items() if meaning]
    total = [f"Traffic of all clients and rounds: {', '.join(traffic)}."] if traffic else []
    return "\n\n".join(["## Metrics", markdown_table(["model", *kinds], lines), *total, "\n".join(notes)])
