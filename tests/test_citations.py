"""Tests of citations: valid BibTeX, a citation for each method, dataset and paper recipe, and authors in docstrings."""

import importlib
import inspect
import pkgutil
import re
import unicodedata
from pathlib import Path

import pytest
import yaml

import lightning_fcl
import lightning_fcl.methods
from lightning_fcl.data.datasets import list_datasets
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.bibliography import find_entries, packaged_entries, parse_bibtex
from lightning_fcl.evaluation.hyperparameters import find_nodes
from lightning_fcl.evaluation.recorded_run import RecordedRun
from lightning_fcl.evaluation.run_data import Run
from lightning_fcl.methods import Method
from lightning_fcl.runs.paper_rows import expand_grids, list_recipes, read_rows, recipes_folder, row_citations
from lightning_fcl.runs.run_citations import class_entries, find_sources

BIB = Path(lightning_fcl.__file__).parent / "evaluation" / "citations.bib"
REQUIRED = {
    "article": {"author", "title", "journal", "year"},
    "inproceedings": {"author", "title", "booktitle", "year"},
    "techreport": {"author", "title", "institution", "year"},
    "misc": {"author", "title"},
}
# "Chaudhry et al., 2019", "Li and Hoiem, 2016", "Usmanova et al. (2021)", "Yuan et al., ICCV 2021".
CITED = re.compile(r"((?:De |van )?[A-Z][\w-]+)(?: et al\.?| and ([A-Z][\w-]+)),? (?:[A-Z]+ )?\(?(\d{4})")
ACCENTS = {"`": "\u0300", "'": "\u0301", '"': "\u0308", "v": "\u030c", "c": "\u0327"}


def plain(text):
    """Return a value of BibTeX without commands for accents and without braces."""
    accented = re.sub(
        r"\{\\([`'\"]|[vc](?=\{))\{?(\w)\}?\}", lambda m: unicodedata.normalize("NFC", m[2] + ACCENTS[m[1]]), text
    )
    return accented.replace(r"{\o}", "ø").replace(r"{\ae}", "æ").replace("{", "").replace("}", "")


def family_names(entry):
    return [plain(author).partition(",")[0].strip() for author in entry.fields["author"].split(" and ")]


def check_bibtex(text):
    """Check BibTeX with a grammar that is independent of `parse_bibtex`. Return the kind and the key of each entry."""
    entries = re.split(r"\n\n(?=@)", "\n".join(line for line in text.splitlines() if not line.startswith("%")).strip())
    found = []
    for entry in entries:
        lines = entry.splitlines()
        kind, key = re.fullmatch(r"@([a-z]+)\{([a-z][a-z0-9_]*),", lines[0]).groups()
        assert lines[-1] == "}", key
        names = []
        for line in lines[1:-1]:
            name, value = re.fullmatch(r"  ([a-z]+) = \{(.*)\},", line).groups()
            depth = 0
            for character in value:
                depth += {"{": 1, "}": -1}.get(character, 0)
                assert depth >= 0, (key, name)
            assert depth == 0 and value.strip() == value != "", (key, name)
            assert not re.search(r"(?<!\\)[&%$#_]", value), (key, name)
            names.append(name)
        assert REQUIRED[kind] <= {*names} and len({*names}) == len(names), key
        found.append((kind, key))
    return found


def library_classes():
    for info in pkgutil.walk_packages(lightning_fcl.__path__, "lightning_fcl."):
        if info.name.rpartition(".")[2] not in ("__main__", "pytest_plugin"):
            module = importlib.import_module(info.name)
            for kind in vars(module).values():
                if inspect.isclass(kind) and kind.__module__ == info.name and vars(kind).get("citations"):
                    yield kind


def test_packaged_entries_are_valid_and_complete():
    text = BIB.read_text(encoding="utf-8")
    found = check_bibtex(text)
    assert text.isascii() and len(found) > 60
    assert [key for _, key in found] == [*packaged_entries()]
    assert [entry.kind for entry in packaged_entries().values()] == [kind for kind, _ in found]
    for key, entry in packaged_entries().items():
        if key != "lightning_fcl":
            year = entry.fields["year"]
            assert re.fullmatch(r"(19|20)\d\d", year) and year in key, key
            ascii_name = unicodedata.normalize("NFKD", family_names(entry)[0].replace("ö", "oe")).encode(
                "ascii", "ignore"
            )
            assert key.startswith(re.sub("[^a-z]", "", ascii_name.decode().lower())), key
            assert all(family_names(entry)) and entry.fields["author"].count(",") == len(family_names(entry)), key
            arxiv = re.search(r"arXiv:(\d\d)\d\d\.\d{4,5}$", entry.fields.get("howpublished", ""))
            assert arxiv is None or f"20{arxiv[1]}" == year, key


def test_library_entry_agrees_with_citation_file():
    citation = yaml.safe_load((BIB.parents[2] / "CITATION.cff").read_text(encoding="utf-8"))
    entry = packaged_entries()["lightning_fcl"]
    assert plain(entry.fields["title"]).lower() == citation["title"].lower()
    assert plain(entry.fields["author"]) == " and ".join(author["name"] for author in citation["authors"])


@pytest.mark.seconds
def test_citations_agree_with_first_line_of_docstring():
    used = set()
    for kind in library_classes():
        entries = find_entries(kind.citations, kind.__name__)
        used |= {entry.key for entry in entries}
        cited = CITED.findall(kind.__doc__.partition("\n")[0])
        for first, second, year in cited:
            matches = [
                entry
                for entry in entries
                if entry.fields["year"] == year
                and family_names(entry)[0] == first
                and second in ("", family_names(entry)[-1])
            ]
            assert len(matches) == 1, (kind.__name__, first, year)
            assert (len(family_names(matches[0])) == 2) == bool(second), (kind.__name__, first, year)
        if issubclass(kind, Method):
            assert cited, f"the first line of the docstring of {kind.__name__} names no paper"
            assert entries[0].fields["year"] in [year for _, _, year in cited], kind.__name__
    used |= {key for source in list_datasets() for key in source.citation_keys}
    used |= {*recipe_keys(), "lightning_fcl"}
    assert used == {*packaged_entries()}, "citations.bib contains entries that nothing cites"


def test_every_public_method_has_a_citation():
    names = [name for name in lightning_fcl.methods.__all__ if name[0].isupper()]
    methods = [kind for name in names if issubclass(kind := getattr(lightning_fcl.methods, name), Method)]
    assert len(methods) > 40
    assert [kind.__name__ for kind in methods if kind is not Method and not class_entries(kind)] == []


def test_every_dataset_has_citations_that_agree_with_its_text():
    for source in list_datasets():
        entry = packaged_entries()[source.citation_keys[0]]
        authors, _, rest = source.citation.partition(": ")
        names = family_names(entry)
        expected = {1: names[0], 2: " and ".join(names[:2])}.get(len(names), f"{names[0]} et al.")
        assert authors == expected and rest.rstrip(".").endswith(entry.fields["year"]), source.name
        title = re.sub(r"[^a-z0-9]", "", rest.lower())
        words = re.sub(r"[^a-z0-9]", "", plain(entry.fields["title"]).lower())
        assert words[:18] == title[:18], source.name
        assert all(key in packaged_entries() for key in source.citation_keys)


def recipe_keys():
    for path in recipes_folder().glob("*/rows.yaml"):
        content = read_rows(path.parent)
        yield from content.get("citations", ())
        for row in expand_grids(content).values():
            yield from row.citations


def recipe_run(content):
    return RecordedRun(Run(Path("run"), "", 0, True, {}, {}, {}, content), {}, {})


@pytest.mark.seconds
@pytest.mark.parametrize("paper", sorted(path.parent.name for path in recipes_folder().glob("*/rows.yaml")))
def test_every_paper_recipe_has_a_citation(paper):
    recipes = {name: row for name, row in list_recipes(paper=paper).items() if name != "quickstart"}
    assert recipes
    for name, row in recipes.items():
        content = row.recipe.content()
        content.setdefault("recipe", {})["row"] = row.title
        for node in find_nodes(content):  # a recipe can have short names
            if "." not in node["class_path"]:
                node["class_path"] = next(
                    (
                        f"{package}.{node['class_path']}"
                        for package in ("lightning_fcl.data.scenarios", "lightning_fcl.data.partition")
                        if hasattr(importlib.import_module(package), node["class_path"])
                    ),
                    node["class_path"],
                )
        sources = find_sources(recipe_run(content))
        assert [*sources.entries], name
        assert sources.data or paper in ("fedclip", "fedclip-hhar", "incfed", "ucihar-reservoir"), name
        assert sources.not_imported == [], name


def test_row_citations_of_grid_and_other_recipes():
    assert row_citations("leaderboard", "P4 TinyImageNet beta .5 RanPAC") == ("mcdonnell2023ranpac",)
    assert row_citations("flwf", "FLwF") == ("usmanova2021flwf",)
    for paper, row in (("", "FLwF"), ("mine", "FLwF"), ("flwf", "mine"), ("../flwf", "FLwF"), (".", "x")):
        assert row_citations(paper, row) == ()


def test_citations_of_subclass_are_not_inherited():
    class Mine(lightning_fcl.methods.FedProx):
        """A method of a user."""

    assert class_entries(Mine) == () and len(class_entries(lightning_fcl.methods.FedProx)) == 1
    assert class_entries(lambda: None) == ()


def test_find_entries_accepts_own_bibtex_and_keys():
    own = '@article{me2026,\n author = "Me, A. and {You}, B.", title = {A {B} c}, year = 2026, month = jan }'
    first, second, third = find_entries((own, "li2020fedprox", "@misc{x, note={}}"), "Mine")
    assert first.fields == {"author": "Me, A. and {You}, B.", "title": "A {B} c", "year": "2026", "month": "jan"}
    assert first.text == own and second.key == "li2020fedprox" and third.fields == {"note": ""}
    assert find_entries(own, "Mine") == (first,)


@pytest.mark.parametrize(
    "citation",
    [
        "unknown2020key",
        "",
        7,
        None,
        "@article{key}",
        "@article{, title = {x}}",
        "@article{key, title = {x}",
        "@article{key, title = {x{}}",
        "@article{key, title = {x}}}",
        "@article{key, title = {x}} text",
        "@article{key, title = x y}",
        "@article{key, title {x}}",
        '@article{key, title = "x}',
        '@article{key, title = "}"}',
        "@article(key, title = {x})",
        "@article{a b, title = {x}}",
        "@article{key, title = {x}}\n@article{key, title = {y}}",
    ],
)
def test_find_entries_rejects_invalid_citation(citation):
    with pytest.raises(InvalidValueError) as error:
        find_entries((citation,), "Mine")
    assert "Mine" in str(error.value) or "BibTeX" in str(error.value)
    if "Write the whole entry" in str(error.value):
        fix = re.search(r"citations = \(\"(.*)\",\)", str(error.value))[1]
        assert find_entries((fix,), "Mine")[0].fields == {"title": "A title"}
    else:
        assert "Correct the BibTeX entry" in str(error.value) or "twice" in str(error.value)


def test_parse_bibtex_ignores_comments_and_blank_lines():
    text = "% comment @ {\n\n@misc{a, note = {1}}\n  % more\n@misc{b, note = {2},}\n"
    assert [(entry.key, entry.fields["note"]) for entry in parse_bibtex(text)] == [("a", "1"), ("b", "2")]
    assert parse_bibtex("") == []
