"""Summary of a plan as text and as charts: the classes in each round and of each client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_fcl.data.scenarios import EMPTY, IntArray, Plan
from lightning_fcl.validation import format_names, require_package

if TYPE_CHECKING:
    from lightning_fcl.evaluation.charts import Spec

_MOST_ROUNDS, _MOST_CLIENTS, _MOST_LINES = 120, 60, 30


def describe_plan(plan: Plan, classes: Sequence[str]) -> str:
    """Return a plan as text. Rounds with the same clients and classes as the previous round are left out.

    At most 30 rounds are listed.

    Args:
        plan: The plan.
        classes: Names of the classes. Empty if targets are not classes.
    """
    names, counts = plan.group_names(classes), _counts(plan)
    kind = "class" if plan.groups_are_classes else "group"
    total, seen_groups, lines, last = sum(map(plan.num_client_samples, plan.clients)), set[int](), list[str](), None
    for number, (current, count) in enumerate(zip(plan.train, counts, strict=True)):
        present = np.flatnonzero(count).tolist()
        if (frozenset(current), present) == last:
            continue
        last = frozenset(current), present
        new_names = format_names(names[group] for group in present if group not in seen_groups) or "-"
        known_names = format_names(names[group] for group in present if group in seen_groups) or "-"
        seen_groups.update(present)
        lines.append(f"{number + 1:6}{len(current):9}{count.sum():9}   {new_names:40} {known_names}")
    footer = [f"   ... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join(
        [
            f"{plan.num_rounds} rounds, {len(plan.clients)} clients with {total} samples, {len(plan.test)} to test, "
            f"{len(plan.validation)} to validate",
            f"{'round':>6}{'clients':>9}{'samples':>9}   {f'{kind}: new':40} {kind}: known",
            *lines[:_MOST_LINES],
            *footer,
        ]
    )


def plot_plan(plan: Plan, classes: Sequence[str]) -> Spec:
    """Return three heat maps of a plan.

    The first heat map shows the number of samples per class and round. The second shows the task of each client per
    round. The third shows the number of samples per class and client. If the test groups are not classes, the charts
    show these groups in place of classes. The charts show at most 120 evenly spaced rounds, and at most the first 60
    clients.

    Args:
        plan: The plan.
        classes: Names of the classes. Empty if targets are not classes.
    """
    require_package("altair", "draws charts")
    import altair as alt

    from lightning_fcl.evaluation import charts

    names, kind = plan.group_names(classes), "class" if plan.groups_are_classes else "group"
    rounds = np.unique(np.linspace(0, plan.num_rounds - 1, _MOST_ROUNDS).round().astype(int)).tolist()
    clients = plan.clients[:_MOST_CLIENTS]
    by_round = [
        {"round": round_idx + 1, "group": names[group], "samples": count}
        for round_idx, counts in zip(rounds, _counts(plan, rounds), strict=True)
        for group, count in enumerate(counts.tolist())
        if count
    ]
    by_client = [
        {"client": client, "group": names[group], "samples": count}
        for client in clients
        for group, count in enumerate(
            np.bincount(plan.groups[plan.client_indices(client)], minlength=len(names)).tolist()
        )
        if count
    ]
    tasks = [
        {"client": client, "round": round_idx + 1, "task": plan.experiences[client][round_idx] + 1}
        | {"samples": len(plan.train[round_idx][client])}
        for round_idx in rounds
        for client in clients
        if client in plan.train[round_idx]
    ]
    x = alt.X("round:O", title="round", axis=charts.integer_axis())
    group = alt.Y("group:N", sort=names, title=kind)
    client = alt.Y("client:N", sort=list(clients), title="client")
    samples = alt.Color("samples:Q", scale=alt.Scale(scheme="viridis", domainMin=0), title="samples")
    task = alt.Color("task:O", scale=alt.Scale(scheme="viridis"), title="task")
    pieces = [
        charts.get_chart("by_round").mark_rect().encode(x, group, samples).properties(title=f"Samples of each {kind}"),
        charts.get_chart("tasks").mark_rect().encode(x, client, task).properties(title="Task of each client"),
        charts.get_chart("by_client")
        .mark_rect()
        .encode(alt.X("client:N", sort=list(clients), title="client", axis=charts.integer_axis()), group, samples)
        .properties(title=f"Samples of each {kind} and client"),
    ]
    chart = alt.vconcat(*(piece.properties(width=560) for piece in pieces)).resolve_scale(color="independent")
    return charts.spec(chart, by_round=by_round, by_client=by_client, tasks=tasks)


def _counts(plan: Plan, rounds: Sequence[int] | None = None) -> Iterator[IntArray]:
    """Yield the number of samples per group for each round, summed over all clients. Each array has shape (groups,)."""
    # Consecutive rounds can share one dict of samples. Its samples are counted only once.
    cached_counts: dict[int, IntArray] = {}
    for round_idx in range(plan.num_rounds) if rounds is None else rounds:
        current = plan.train[round_idx]
        if id(current) not in cached_counts:
            rows = np.concatenate([EMPTY, *current.values()])
            cached_counts = {id(current): np.bincount(plan.groups[rows], minlength=int(plan.groups.max()) + 1)}
        yield cached_counts[id(current)]
