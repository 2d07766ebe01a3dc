"""Files that are written under a temporary name and then renamed: an interruption leaves none half-written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fcl.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place only if all goes well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure whole or not at all."""
    canvas = require("matplotlib.backends.backend_agg", "draws figures").FigureCanvasAgg(figure)
    with replacing(path) as temporary:
        canvas.print_png(temporary)  # `savefig` would draw it twice
    return path
