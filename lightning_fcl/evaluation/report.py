"""A run's report in Markdown: what ran, and every number."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.markdown import markdown_table
from lightning_fcl.evaluation.plots import model_name
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.table import metric_number, metric_title

__all__ = ["PAPER", "extent_of", "metrics_lines", "paper_lines", "title_of", "write_report"]

Results: TypeAlias = Mapping[str, Any]

PAPER = ("metric", "ours", "paper", "difference")

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
    """Write ``report.md`` beside the ``results.json`` of a run.

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
    parts = [_head(results), *_against_paper(results), _metrics_section(results["metrics"], record)]
    if lines := [
        f"- round {entry['round'] + 1}, {client}: {reason}"
        for entry in record["rounds"]
        for client, reason in entry.get("dropped", {}).items()
    ]:
        parts.append("\n".join(["## Dropped clients\n", *lines]))
    if lines := [f"- round {e['round'] + 1}, {client}" for e in record["rounds"] for client in e.get("diverged", [])]:
        parts.append("\n".join(["## Clients whose loss was not finite\n", *lines]))
    return write_whole(folder / "report.md", "\n\n".join(parts) + "\n")


def title_of(results: Results) -> str:
    """What a run is called: its row of a paper's table, or just a run."""
    recipe = results["recipe"]
    paper = f" ({recipe['paper']})" if recipe and recipe["paper"] else ""
    return f"{recipe['row']}{paper}" if recipe else "Run"


def extent_of(results: Results) -> str:
    """How large a run was."""
    clients = [model for model in results["record"]["tasks"] if model != "server"]
    counts = {"round": len(results["record"]["rounds"]), "client": len(clients)}
    return ", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items())


def _head(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    instead = results.get("measured_on") == "validation"
    stopped = "" if results["finished"] else "; the run was stopped before its end"
    measured = "- Measured on the validation samples in place of the test set\n" if instead else ""
    return (
        f"# {title_of(results)}\n\n- Command: `{results['command']}`\n- Seed: {results['seed']}\n"
        f"- Extent: {extent_of(results)}{stopped}\n{measured}- Time: {results['seconds']:.1f} s\n"
        f"- Machine: {results['machine']}\n- Versions: {versions}"
    )


def paper_lines(results: Results) -> dict[str, list[str]]:
    """For each number that the paper tells its title, ours, the paper's, and the difference: the columns `PAPER`."""
    ours, lines = results["metrics"], {}
    for name, paper in results["expected"].items():
        difference = f"{ours[name] - paper:+.3f}" if name in ours else "-"
        lines[name] = [metric_title(name), metric_number(name, ours.get(name)), metric_number(name, paper), difference]
    return lines


def _against_paper(results: Results) -> list[str]:
    lines = [*paper_lines(results).values()]
    return [f"## Against the paper\n\n{markdown_table(PAPER, lines)}"] if lines else []


def _metrics_section(metrics: Mapping[str, float], record: Mapping[str, Any]) -> str:
    """All metrics, a line per model and a column per metric, then what they mean."""
    head, lines, meanings = metrics_lines(metrics, record)
    traffic = [
        f"{way}: {metric_number(n, metrics[n])}"
        for way in ("upload", "download")
        if (n := f"{way}_bytes/total") in metrics
    ]
    notes = "\n".join(f"- `{kind}`: {meaning}" for kind, meaning in meanings)
    total = [f"Traffic of all clients and rounds: {', '.join(traffic)}."] if traffic else []
    total += [f"Rehearsed deployment: {told}."] if (told := clock_line(metrics)) else []
    return "\n\n".join(["## Metrics", markdown_table(head, lines), *total, notes])


def clock_line(metrics: Mapping[str, float]) -> str:
    """How long the rehearsed deployment took, and how many uploads came late; nothing where no clock ran.

    Example:
        >>> clock_line({"simulated_seconds/total": 90.0, "late/total": 2.0})
        '90.0 s, 2 late uploads'
    """
    if "simulated_seconds/total" not in metrics:
        return ""
    late = int(metrics["late/total"])
    return f"{metrics['simulated_seconds/total']:.1f} s, {late} late upload{'s' * (late != 1)}"


def metrics_lines(
    metrics: Mapping[str, float], record: Mapping[str, Any]
) -> tuple[list[str], list[list[str]], list[tuple[str, str]]]:
    """All metrics as a table: its head, a line for each model, and what each metric means."""
    pairs = [name.rpartition("/")[::2] for name in metrics]
    kinds = list(dict.fromkeys(kind for kind, model in pairs if model != "total"))
    models = sorted(
        dict.fromkeys(model for _, model in pairs if model != "total"),
        key=lambda model: {"server": 0, "clients": 1}.get(model, 2),
    )
    lines = [[model_name(m), *(metric_number(k, metrics.get(f"{k}/{m}")) for k in kinds)] for m in models]
    # A_5 and F_5 are explained as A_T and F_T.
    meanings = {kind: _MEANINGS.get(f"{kind[0]}_T" if kind[2:].isdigit() else kind) for kind in kinds}
    for one in record.get("measures", []):
        way = "higher" if one["higher_is_better"] else "lower"
        meanings |= {f"{k}_{one['name']}": f"{one['name']} ({way} is better) {what}" for k, what in _MEASURED.items()}
    own = ", of the client's own model: after its last local training of each task, before aggregation"
    meanings |= {f"{kind}_own": f"{meaning}{own}" for kind, meaning in meanings.items() if meaning}
    told = [(kind, meaning) for kind in kinds if (meaning := meanings.get(kind))]
    return ["model", *kinds], lines, told
