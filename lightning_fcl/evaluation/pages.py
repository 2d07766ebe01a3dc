"""Pages for a browser: each one file that asks no host for anything, by a template of the folder beside this file."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from lightning_fcl import __version__
from lightning_fcl.evaluation.files import cache_folder, write_whole

_TEMPLATES = Path(__file__).parent / "templates"


def fill_template(template: str, **values: Any) -> str:
    """The HTML of a template: whatever the values say is shown as text, and the browser may ask for nothing else."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    texts = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    return environment.get_template(template).render(values, version=__version__, texts=texts, library=_library)


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; kept between processes, as putting it together takes seconds."""
    folder, name = cache_folder() / "scripts", f"vega-{version('vl-convert-python')}"
    for path in folder.glob(f"{name}-*.js"):
        text = path.read_text(encoding="utf-8")
        if path.stem.endswith(_digest(text)):
            return text
    made = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed").replace("</script", "<\\/script")
    with suppress(OSError):  # a folder that cannot be written to costs time, no more
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}-{_digest(made)}.js", made)
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
