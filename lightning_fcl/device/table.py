"""The device report for readers: Markdown tables whose columns are aligned, so that a terminal shows them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fcl.evaluation.markdown import markdown_table


def render(report: Mapping[str, Any]) -> str:
    recipes = " + ".join(report.get("recipes", ())) or "a module"
    device, link = report["device"], report["link"]
    epochs = f"{report['local_epochs']} local epoch" + ("s" if report["local_epochs"] > 1 else "")
    head = (
        f"# Device report: {recipes}\n\n"
        f"A sample is {' x '.join(map(str, report['input']))}; {report['nodes']} nodes, {epochs} of "
        f"{report['samples']} samples per round; on {_named(device)}; over {_named(link)}."
    )
    parts = [head, _model(report), _needs(report), _fits(report), "\n".join(f"- {note}" for note in _notes(report))]
    return "\n\n".join(parts) + "\n"


def _named(profile: Mapping[str, Any]) -> str:
    facts = [profile["description"]] if profile["description"] else []
    for key, unit in (("frequency_mhz", "MHz"), ("voltage_mv", "mV"), ("power_mw", "mW")):
        if profile.get(key):
            facts.append(f"{profile[key]:g} {unit}")
    return f"{profile['name']} ({', '.join(facts)})" if facts else profile["name"]


def _model(report: Mapping[str, Any]) -> str:
    numbers, size, macs = report["parameters"], report["bytes"], report["macs"]
    learning = "adding up the statistics" if macs["learns_by"] == "statistics" else "backward"
    forward = (macs["frozen_forward"], macs["trained_forward"])
    rows: list[tuple[str, int, int]] = [
        ("parameters", numbers["frozen"], numbers["trained"]),
        ("bytes, M_F in int8", size["frozen"], size["trained"]),
        ("bytes, all in fp32", 4 * numbers["frozen"], 4 * numbers["trained"]),
        ("MACs of a sample: forward", *forward),
        (f"MACs of a sample: {learning}", 0, macs["learning"]),
    ]
    lines = [[name, f"{frozen:,}", f"{trained:,}", f"{frozen + trained:,}"] for name, frozen, trained in rows]
    return markdown_table(["model", "M_F, frozen", "M_T, trained", "all"], lines)


def _needs(report: Mapping[str, Any]) -> str:
    memory, sync, time = report["memory"], report["synchronisation"], report["time"]
    nodes, epochs = report["nodes"], time["local_epochs_in_federated_epoch"]
    learning = memory["learning"]
    lines = [
        ["inference: input and output", _bytes(memory["inference"]["bytes"]), memory["inference"]["layer"]],
        ["learning: the layer at hand", _bytes(learning["bytes"]), learning["layer"]],
        ["... with all its buffers at once", _bytes(learning["at_once"]), learning["layer"]],
        ["kept for the backward pass", _bytes(memory["kept"]), "inputs of M_T's layers"],
        ["upload of a node", _bytes(sync["upload_bytes"]), _seconds(sync["upload_s"])],
        ["download of a node", _bytes(sync["download_bytes"]), _seconds(sync["download_s"])],
        ["local epoch", _seconds(time["local_epoch_s"]), f"{_seconds(time['sample_s'])} per sample"],
        ["energy of a local epoch", f"{report['energy_mj']:.3g} mJ", "power x time, without the radio"],
        ["synchronisation", _seconds(time["synchronisation_s"]), f"{2 * nodes} transfers, one after the other"],
        ["federated epoch", _seconds(time["federated_epoch_s"]), f"the time of {epochs} local epochs"],
        [
            "... if the master is a node",
            _seconds(time["federated_epoch_ad_hoc_s"]),
            f"{2 * (nodes - 1)} transfers, {_seconds(time['synchronisation_ad_hoc_s'])}",
        ],
    ]
    return markdown_table(["need", "value", ""], lines)


def _fits(report: Mapping[str, Any]) -> str:
    what = {
        "tcdm": f"largest layer with its weights: {report['memory']['tcdm']['layer']}",
        "ram": "model, gradient and server's copy of M_T, kept inputs"
        if report["macs"]["learns_by"] == "gradients"
        else "model and statistics",
        "flash": "model" if report["macs"]["learns_by"] == "gradients" else "model without statistics",
    }
    if "tcdm" not in report["fits"]:
        what["ram"] += f"; {what['tcdm']}"
    lines = [
        [name, "yes" if entry["fits"] else "no", _bytes(entry["need"]), _bytes(entry["have"]), what[name]]
        for name, entry in report["fits"].items()
    ]
    return markdown_table(["memory", "fits", "need", "have", "of what"], lines)


def _notes(report: Mapping[str, Any]) -> list[str]:
    numbers, sync, device = report["parameters"], report["synchronisation"], report["device"]
    notes = []
    if numbers["folded_norms"]:
        notes.append(
            f"Batch normalisation ({numbers['folded_norms']} layers) is counted as folded: a bias per channel. "
            f"Unfolded there are {numbers['unfolded']:,} parameters, and the simulation sends "
            f"{sync['simulated_upload_bytes']:,} B up and {sync['simulated_download_bytes']:,} B down, running "
            "statistics included."
        )
    if report["macs"]["learns_by"] == "statistics":
        notes.append(
            "M_T is the readout: its sums A and B, sent as the library keeps them, in double precision, and its "
            "weights. Solving for these is not counted, nor are rounds in which the reservoir is adapted."
        )
    else:
        notes.append(
            "The layer at hand holds its weights, input and output, or their gradients in their place: one pass at a "
            "time. Elementwise layers work in place."
        )
    notes.append(
        f"Times are estimates: {device['int8_per_fp32']:g} int8 MACs are assumed to take the time of one in fp32, and "
        f"{device['samples']} samples of {device['int8_macs']:,} and {device['fp32_macs']:,} MACs the "
        f"{device['latency_ms']:g} ms that were measured ({device['source'] or device['name']}); MACs of callbacks are "
        "not counted."
    )
    if report["uncounted"]:
        notes.append(f"No MACs could be counted in {', '.join(report['uncounted'])}: times are too low.")
    return notes


def _bytes(number: int) -> str:
    return f"{number:,} B"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
