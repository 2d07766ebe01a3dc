"""Tests of the built documentation: it loads nothing from other hosts, and its internal links are valid."""

import importlib.util
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def extension(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_extensions" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pytest.importorskip("sphinx")
offline = extension("offline")

LOADS = {
    "script.html": '<script src="https://cdn.example.org/a.js"></script>',
    "style.html": '<link rel="stylesheet" href="//example.org/a.css">',
    "icon.html": '<link rel="icon" href="https://example.org/a.ico">',
    "image.html": '<img alt="badge" src="http://example.org/badge.svg">',
    "sizes.html": '<img src="a.png" srcset="a.png 1x, https://example.org/b.png 2x">',
    "inline.html": '<p style="background: url(https://example.org/a.png)">',
    "sheet.html": "<style>@import 'https://example.org/a.css';</style>",
    "picture.html": '<svg><use xlink:href="https://example.org/a.svg#x"/></svg>',
    "module.html": '<script type="module">import m from "https://example.org/m.js"</script>',
    "font.css": "@font-face { src: url('https://example.org/a.woff2') }",
    "import.css": '@import "//example.org/a.css";',
    "fetch.js": 'fetch("https://example.org/data.json")',
    "import.js": "const m = await import('https://example.org/m.js')",
    "fill.svg": "<style>.a { fill: url(https://example.org/a.svg#b) }</style>",
}


@pytest.mark.parametrize("name", LOADS)
def test_loaded_from_elsewhere_finds_external_resource(name):
    assert len(offline.loaded_from_elsewhere(name, LOADS[name])) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("link.html", '<a href="https://example.org">there</a><p>https://example.org</p>'),
        ("code.html", '<pre>src="https://example.org/a.js"</pre>'),
        ("own.html", '<script src="_static/a.js"></script><img src="data:image/png;base64,AAAA">'),
        ("own.css", ".a { background: url(data:image/svg+xml;base64,AAAA) } .b { fill: url(#c) }"),
        ("own.js", '// https://example.org\nconst about = "https://example.org"; import("./a.js")'),
        ("own.svg", '<svg xmlns="http://www.w3.org/2000/svg"><style>.a { fill: red }</style></svg>'),
    ],
)
def test_loaded_from_elsewhere_ignores_links_and_local_files(name, text):
    assert offline.loaded_from_elsewhere(name, text) == []


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.parts = [], set()

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("href", "src") and value]
        self.parts |= {value for name, value in attrs if name == "id"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. If the site is missing or older than a source, build it with warnings as errors."""
    pages, sources = ROOT / "site" / "html", [ROOT / name for name in ("docs", "lightning_fcl", "recipes", "README.md")]
    files = (file for source in sources for file in ([source] if source.is_file() else source.rglob("*.*")))
    if (pages / "index.html").is_file():
        built = (pages / "index.html").stat().st_mtime
        if all(file.stat().st_mtime < built for file in files if "__pycache__" not in file.parts):
            return pages
    folder = tmp_path_factory.mktemp("site")
    words = ["-M", "html", "docs", folder, "--fail-on-warning", "--keep-going", "-D", "nb_execution_mode=off"]
    built = subprocess.run([sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site):
    assert list(offline.in_folder(site)) == []
    assert len(list(site.rglob("*.html"))) > 25


@pytest.mark.slow
def test_internal_links_have_existing_files_and_anchors(site):
    pages = {path: Links() for path in site.rglob("*.html")}
    for path, page in pages.items():
        page.feed(path.read_text())
    for path, page in pages.items():
        for link in page.found:
            target, _, part = link.partition("#")
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            if ":" not in target:
                assert file.exists(), f"{path.relative_to(site)}: {link}"
                assert not part or file not in pages or part in pages[file].parts, f"{path.relative_to(site)}: {link}"


@pytest.mark.slow
def test_links_to_source_files_become_pages_or_copies(site):
    def links(page):
        parser = Links()
        parser.feed((site / page).read_text())
        return parser.found

    assert "papers/index.html" in links("recipes.html")  # The source links to ../recipes/README.md.
    assert "incfed.html" in links("papers/fedclip.html")  # The included page links to ../incfed/README.md.
    assert "../recipes.html#add-a-paper" in links("papers/index.html")  # The included page links to ../docs/recipes.md.
    copies = [link for link in links("papers/incfed.html") if link.endswith("table.json")]
    assert (site / "papers" / copies[0]).read_bytes() == (ROOT / "recipes" / "incfed" / "table.json").read_bytes()


@pytest.mark.slow
def test_public_names_are_in_api_pages(site):
    import lightning_fcl
    from lightning_fcl import callbacks, models, zoo

    pages = {lightning_fcl: "lightning_fcl", callbacks: "callbacks", models: "models", zoo: "models"}
    for package, page in pages.items():
        text = (site / "api" / f"{page}.html").read_text()
        assert [name for name in package.__all__ if f'id="{package.__name__}.{name}"' not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["index", "trainer", "migration", "papers/flwf", "api/callbacks"])
def test_page_opens_without_errors_or_external_requests(opened, site, name, width):
    page, said, asked = opened(site / f"{name}.html", width)
    page.wait_for_load_state("networkidle")
    assert said == [] and all(url.startswith((site.as_uri(), "data:")) for url in asked)
    assert page.locator("h1").first.is_visible()
    # The page does not scroll sideways: wide tables and code blocks scroll separately.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
