"""Reports of the suite: tables and plots of the measurements, and their copies in the documentation."""

import json
import statistics
from pathlib import Path

import altair as alt

from lightning_fcl.evaluation import charts
from suite.measuring import ENGINES, name_of

ROOT = Path(__file__).parents[2]
SAYS = {
    "digits-100": "100 clients x 15 digits, MLP 64-32-10",
    "digits-1000": "1,000 clients x 15 digits",
    "digits-10000": "10,000 clients x 15 digits",
    "har": "20 clients x 600 windows, HAR-CNN, 5.6 M parameters",
    "har-uneven": "20 clients, ten of them with 60 windows, HAR-CNN",
    "esn": "100 clients x 4 sequences, reservoir of 300 units",
    "vit": "8 clients x 64 images, 6-layer ViT, 2.7 M parameters",
    **{f"drawn-{n}": f"{n:,} clients x 15 digits, 100 sampled per round" for n in (1000, 10000, 100000)},
    **{f"width-{n}": f"100 clients x 15 digits, MLP 64-{n:,}-10" for n in (32, 128, 512, 2048)},
}


def read(out):
    """Return the content of each ``suite-*.json`` file by the name of its workload, in the order of the tables."""
    contents_by_path = {path: json.loads(path.read_text()) for path in Path(out).glob("suite-*.json")}
    contents = {content["workload"]: content for content in contents_by_path.values()}
    return {name: contents[name] for name in SAYS if name in contents}


def middle(values):
    """Return the median, the lowest and the highest of some values."""
    return statistics.median(values), min(values), max(values)


def ratios(engines, engine):
    """Return the engine's time per round divided by the loop's time per round, for each repeat."""
    pairs = zip(engines.get(engine, []), engines.get("loop", []), strict=False)
    return [a["round"] / b["round"] for a, b in pairs if "round" in a and "round" in b]


def _row(workload, engine, runs, engines):
    """Return the cells of a row of `table`."""
    cells = [SAYS[workload], name_of(engine)]
    completed_runs = [run for run in runs if "round" in run]
    if not completed_runs:
        return [*cells, runs[0]["error"].removeprefix("refused: ").replace("|", "/"), *[""] * 5]
    seconds, low, high = middle([run["round"] for run in completed_runs])
    compared = ratios(engines, engine)
    ratio = "{:.2f} ({:.2f} to {:.2f})".format(*middle(compared)) if compared and engine != "loop" else ""
    differs = [run["differs"] for run in completed_runs if run.get("differs") is not None]
    return [
        *cells,
        f"{1000 * seconds:,.1f} ms ({1000 * low:,.1f} to {1000 * high:,.1f})",
        ratio,
        f"{1000 * statistics.median([run['cpu'] for run in completed_runs]):,.1f} ms",
        f"{statistics.median([run['memory'] for run in completed_runs]):,.0f} MiB",
        f"{statistics.median([run['start'] for run in completed_runs]):.2f} s",
        f"{max(differs):.0e}" if differs else "",
    ]


def table(contents):
    """Return a Markdown table of all workloads and engines. Workloads with client sampling are left out."""
    head = [
        "workload", "engine", "time per round", "ratio to loop", "processor time per round", "peak memory", "start-up",
        "difference from loop",
    ]  # fmt: skip
    rows = [
        _row(workload, engine, content["engines"][engine], content["engines"])
        for workload, content in contents.items()
        if not workload.startswith("drawn-")
        for engine in ENGINES
        if content["engines"].get(engine)
    ]
    return _markdown(head, "llrrrrrr", rows)


def scale(contents):
    """Return a Markdown table of this library's rounds with 100 sampled clients, for each number of clients."""
    rows, base = [], None
    for workload, content in contents.items():
        completed_runs = [run for run in content["engines"].get("ours", []) if "round" in run]
        if not workload.startswith("drawn-") or not completed_runs:
            continue
        setup, first, seconds, memory, memory_growth = (
            statistics.median([run[name] for run in completed_runs])
            for name in ("setup", "first", "round", "memory", "grown")
        )
        base = base or memory
        clients = int(workload.removeprefix("drawn-"))
        cells = [f"{clients:,}", f"{setup:.2f} s", f"{first:.2f} s", f"{1000 * seconds:.1f} ms"]
        rows.append([*cells, f"{memory:,.0f} MiB", f"{memory / base:.2f}", f"{memory_growth:,.0f} MiB"])
    head = ["clients", "set-up", "from set-up to first round", "time per round", "peak memory without data"]
    return _markdown([*head, "ratio to first row", "growth since set-up"], "rrrrrrr", rows)


def _markdown(head, sides, rows):
    """Return a Markdown table. ``sides`` has one letter per column: l (left) or r (right)."""
    line = [{"l": "---", "r": "---:"}[side] for side in sides]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, line, *rows)) + "\n"


def about(contents, has_ranges=True):
    """Return sentences that describe the machine and the values. ``has_ranges``: whether cells also contain ranges."""
    machine = next(iter(contents.values()))["machine"]
    device = machine["gpu"] or f"{machine['cores']} cores of an {machine['processor']}"
    sizes = (
        " The sizes are small (`--quick`), so the numbers cannot be used to compare speed."
        if any(c["quick"] for c in contents.values())
        else ""
    )
    return (
        f"Measured on {device} with torch {machine['torch']}, one thread per process. "
        f"Values are the median{' (lowest to highest)' if has_ranges else ' of the repeats'}.{sizes}\n"
    )


def plot(contents, path):
    """Draw the curves over the number of clients and the model size, and the speedup of two processes over one."""
    curves = [
        ("digits-", "number of clients, all train in each round", "round", "seconds per round"),
        ("drawn-", "number of clients, 100 sampled per round", "memory", "peak memory, MiB"),
        ("width-", "hidden units", "round", "seconds per round"),
    ]
    data, parts = {}, []
    for begin, label, key, unit in curves:
        names = [name for name in contents if name.startswith(begin)]
        # A curve needs at least two sizes.
        if len(names) > 1:
            data[label] = _points(contents, names, key)
            scale = alt.Scale(type="log") if key == "round" else alt.Scale(zero=True)
            base = charts.get_chart(label).encode(x=alt.X("size:Q", title=label, scale=alt.Scale(type="log")))
            engines = list(dict.fromkeys(point["line"] for point in data[label]))
            parts.append(alt.layer(*charts.small_multiples(base, engines, unit, scale)[1:]))
    data["gains"] = _gains(contents)
    bars = (
        charts.get_chart("gains")
        .mark_bar()
        .encode(
            x=alt.X("workload:N", title=None, sort=None, axis=alt.Axis(labelAngle=0)),
            xOffset="line:N",
            y=alt.Y("value:Q", title="speedup of two processes over one", scale=alt.Scale(domain=[0, 2.3])),
            color=charts.color_scale("line", ["Trainer", "by hand"]),
        )
    )
    twice = charts.get_chart("gains").mark_rule(strokeDash=[2, 2]).encode(y=alt.datum(2))
    parts.append(alt.layer(bars, twice))
    whole = alt.concat(*(part.properties(width=380, height=270) for part in parts), columns=2)
    whole = whole.resolve_scale(color="independent", shape="independent", strokeDash="independent")
    charts.write_png(Path(path), charts.spec(whole, **data))


def _points(contents, names, key):
    """Return a point for each engine and size: the median over the repeats."""
    return [
        {"line": name_of(engine), "size": int(name.rpartition("-")[2]), "value": statistics.median(values)}
        for engine in ENGINES
        for name in names
        if (values := [run[key] for run in contents[name]["engines"].get(engine, []) if key in run])
    ]


def _gains(contents):
    """Return the speedup of two processes over one, for this library's Trainer and for the hand-written loop."""
    points = []
    for label, (single_engine, double_engine) in {
        "Trainer": ("ours", "ours-two-ranks"),
        "by hand": ("loop", "loop-two"),
    }.items():
        for name in ("har", "har-uneven", "esn", "vit"):
            engines = contents[name]["engines"] if name in contents else {}
            runs = zip(engines.get(single_engine, []), engines.get(double_engine, []), strict=False)
            if gains := [a["round"] / b["round"] for a, b in runs if "round" in a and "round" in b]:
                points.append({"line": label, "workload": name, "value": statistics.median(gains)})
    return points


def write(out, documents=False):
    """Write the table and the plots to ``out``. With ``documents``, the pages of the documentation are updated, too."""
    contents = read(out)
    if not contents:
        raise SystemExit(f"Expected measurements in {out}, but found none. Run the command without `--report`.")
    text = f"{about(contents)}\n{table(contents)}"
    (Path(out) / "suite.md").write_text(f"{text}\n{scale(contents)}")
    plot(contents, Path(out) / "suite.png")
    print(text)
    if documents:
        if quick := [workload for workload, content in contents.items() if content["quick"]]:
            raise SystemExit(
                f"Expected measurements at full size for `--write`, but these workloads were measured with `--quick`: "
                f"{', '.join(quick)}. Measure them again without `--quick` and `--report`."
            )
        fill(ROOT / "benchmarks" / "README.md", "suite", f"{text}\n![Curves](suite.png)\n")
        plot(contents, ROOT / "benchmarks" / "suite.png")
        fill(ROOT / "docs" / "scale.md", "drawn", f"{about(contents, has_ranges=False)}\n{scale(contents)}")


def fill(path, name, text):
    """Replace the text between the two markers of a page."""
    text_before, mark, rest = path.read_text().partition(f"<!-- {name}: begin -->\n")
    _, end, text_after = rest.partition(f"<!-- {name}: end -->")
    if not mark or not end:
        raise ValueError(
            f"Expected the markers `<!-- {name}: begin -->` and `<!-- {name}: end -->` in {path}, but at least one is "
            "missing. Add both markers."
        )
    path.write_text(f"{text_before}{mark}\n{text}\n{end}{text_after}")
