"""The rooms of the package: no circle among its modules, and a word in each on what belongs there."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import lightning_fcl

PACKAGE = Path(lightning_fcl.__file__).parent


def test_no_circle_among_modules():
    """Also counting what is imported inside functions."""
    graph = grimp.build_graph("lightning_fcl", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 90
    TopologicalSorter(imports).prepare()


def test_each_room_says_what_never_belongs_in_it():
    rooms = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert len(rooms) == 16
    for room in rooms:
        lines = (PACKAGE / room / "__init__.py").read_text().splitlines()
        assert not lines[1] and lines[2], room
