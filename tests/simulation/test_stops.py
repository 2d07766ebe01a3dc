"""Tests of the table in CONTRIBUTING.md that lists the functions from a batch to the server's new state."""

import importlib
import re
import sys
from functools import reduce
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_stops():
    """Return the file and the code object of each function in the table of CONTRIBUTING.md."""
    rows = re.findall(
        r"^\| \d+ \| `([\w/]+)\.py` \| `([\w.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    found = []
    for file, name in rows:
        module = importlib.import_module(f"lightning_fcl.{file.replace('/', '.')}")
        found.append((file, reduce(getattr, name.split("."), module).__code__))
    return found


def test_table_of_functions_is_short():
    files = [file for file, _ in read_stops()]
    assert 15 < len(files) <= 22 and len({*files}) <= 9


def test_table_of_functions_equals_calls_of_a_fit(fit, make_stream, make_task):
    codes = [code for _, code in read_stops()]
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code in codes and (calls or frame.f_code is codes[0]):
            calls.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fit(make_task(), make_stream(num_clients=1), max_epochs=1, max_vectorized_clients=1)
    finally:
        sys.setprofile(before)
    *way, end = codes  # `end` loads a state into the module, and is also called for client states.
    assert [*dict.fromkeys(call for call in calls if call is not end)] == way
    assert calls[len(calls) - calls[::-1].index(way[-1])] is end
