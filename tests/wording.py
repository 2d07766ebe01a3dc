"""Find the texts of the project: docstrings, comments, messages and paragraphs of pages.

`python tests/wording.py --seed 1` draws a sample of each kind to read.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".pyi", ".md", ".yaml", ".yml", ".toml", ".html", ".cff", ".sh"}
NAMES = {"Makefile", "run"}  # .ci/run
SAMPLE_SIZES = {"docstring": 40, "comment": 20, "message": 20, "paragraph": 20}
MESSAGE_CALLS = {
    *("debug", "info", "warning", "error", "exception", "critical", "warn", "warn_once", "print", "exit"),
    *("rank_zero_info", "rank_zero_warn", "add_argument", "add_parser", "ArgumentParser", "add_note"),
}
BLOCKS = {"paragraph_open": "paragraph", "heading_open": "heading", "th_open": "cell", "td_open": "cell"}
DIRECTIVES = re.compile(r"#!|# ?(noqa|type:|pragma|fmt:|mypy:|ruff:)")
GLOSSARY = re.compile(r"^#+ .*glossary", re.I)

PHRASES = {
    r"side by side": "vectorized, in parallel, next to",
    r"one (after|by) (the other|one)": "sequentially",
    r"(go|goes|going|went|gone) on (from|with)": "resume from, continue with",
    r"at hand": "current",
    r"anew": "again",
    r"so many": "the number of",
    r"by lot": "at random",
    r"in silence": "silently",
    r"worst[- ]off": "worst",
    r"no more than": "at most",
    r"not finite": "non-finite",
    r"as ever|all the same|for good": "nothing: delete it",
    r"(come|comes|coming|came|bring|brings|bringing|brought) together": "aggregate, combine",
    r"to the (last )?bit": "bitwise identical",
    r"(in|of) (the )?midst": "during",
    r"whoever|whosoever": "the noun",
    r"left over": "residual, remaining",
    r"cut short": "interrupted, truncated",
    r"is told|are told|tells": "reports, specifies, receives",
    r"(is|are|be) of (no )?use": "useful, valid, supported",
    r"stays? at home|travels?": "is client-local, is uploaded, is downloaded",
    r"mends?|mended|mending": "fix",
    r"rehears(e|es|ed|al|als|ing)": "simulate, replay",
    r"has a meaning": "is defined",
}
"""Regular expressions of phrases that a plain phrase can always replace, and the plain phrases."""
PATTERNS = {re.compile(rf"\b({phrase})\b", re.I): plain for phrase, plain in PHRASES.items()}
RIDDLE = re.compile(r"(What|Who|Whose|Whoever|Whatever|Whichever|Of) (?!.*\?$)")


@dataclass(frozen=True)
class Text:
    """A text and its place.

    Args:
        path: Path from the root of the project.
        line: First line of the text.
        kind: "docstring", "comment", "message", "string", "paragraph", "heading" or "cell".
        text: Text in one line. `X` replaces code in backticks and addresses.
    """

    path: str
    line: int
    kind: str
    text: str


def join_lines(text: str) -> str:
    """Return a text in one line. Code and addresses become `X`."""
    prose = re.sub(r">>>.*|``[^`]*``|`[^`]*`|\(?https?://\S+", "X", text)
    return " ".join(prose.split())


def find_files() -> list[Path]:
    """Return the files of the project that contain text."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return sorted({p for p in paths if p.is_file() and (p.suffix in SUFFIXES or p.name in NAMES)})


def string_value(node: ast.expr) -> str | None:
    """Return the text of a string, or of an f-string with `X` for each value. For another expression, return None."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def read_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of docstrings, of strings of at least three words, and of blocks of comments."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    nested: set[int] = set()  # parts of f-strings
    messages: set[int] = set()
    for node in ast.walk(tree):
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else ():
            if isinstance(statement, ast.Expr) and (text := string_value(statement.value)) is not None:
                docstrings.add(id(statement.value))
                yield statement.lineno, "docstring", text
        if isinstance(node, ast.JoinedStr):
            nested.update(id(part) for value in node.values for part in ast.walk(value))
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise) or called in MESSAGE_CALLS or called.endswith(("Error", "Warning")):
            messages.update(id(part) for part in ast.walk(node))
    for node in ast.walk(tree):
        text = string_value(node) if isinstance(node, ast.expr) else None
        if text is not None and text.count(" ") >= 2 and id(node) not in docstrings | nested:
            yield node.lineno, "message" if id(node) in messages else "string", text
    yield from read_comment_blocks(source)


def read_comment_blocks(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of the comments of Python code. Comments of successive lines are one text."""
    block: list[str] = []
    start = previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVES.match(token.string):
            continue
        line = token.start[0]
        if block and (line != previous + 1 or token.line.lstrip()[0] != "#"):
            yield start, "comment", " ".join(block)
            block = []
        start = start if block else line
        previous = line
        block.append(token.string.lstrip("# "))
    if block:
        yield start, "comment", " ".join(block)


def read_markdown(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of the paragraphs, headings and table cells. A glossary is left out."""
    line = 1
    kind = ""
    in_glossary = False
    for token in MarkdownIt().enable("table").parse(source):
        line = token.map[0] + 1 if token.map else line
        if token.type == "heading_open":
            in_glossary = bool(GLOSSARY.match(source.splitlines()[line - 1]))
        kind = BLOCKS.get(token.type, kind)
        if token.type == "inline" and not in_glossary:
            yield line, kind, token.content


def read_comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of the comments of YAML, TOML, make and shell files, and of the text of HTML files."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#+ (.*)|>([^<>{}]*\s[^<>{}]*\s[^<>{}]*)<", line):
            yield number, "comment", match[1] or match[2]


def read_texts(path: Path) -> list[Text]:
    """Return the texts of a file."""
    read = read_python if path.suffix in (".py", ".pyi") else read_markdown if path.suffix == ".md" else read_comments
    name = str(path.relative_to(ROOT))
    return [Text(name, line, kind, join_lines(text)) for line, kind, text in read(path.read_text(encoding="utf-8"))]


def find_phrases(text: Text) -> list[str]:
    """Return a message for each phrase of the text that has a plain equivalent."""
    found = [
        f"{text.path}:{text.line}: {match[0]!r}. Write: {plain}."
        for pattern, plain in PATTERNS.items()
        for match in pattern.finditer(text.text)
    ]
    if text.kind in ("docstring", "comment") and RIDDLE.match(text.text):
        found.append(f"{text.path}:{text.line}: {text.text[:60]!r}. Write: a verb or a noun first.")
    return found


def draw(texts: list[Text], seed: int) -> list[Text]:
    """Return random texts of each kind, at least four words each, as many as `SAMPLE_SIZES` specifies."""
    kinds = defaultdict(list)
    for text in texts:
        if len(text.text.split()) >= 4:
            kinds[text.kind].append(text)
    generator = random.Random(seed)
    return [text for kind, size in SAMPLE_SIZES.items() for text in generator.sample(kinds[kind], size)]


def main() -> None:
    """Print a sample with the lines around each text."""
    parser = argparse.ArgumentParser(description="Draw texts to read.")
    parser.add_argument("--seed", type=int, default=0)
    texts = [text for path in find_files() for text in read_texts(path)]
    for number, text in enumerate(draw(texts, parser.parse_args().seed), 1):
        lines = (ROOT / text.path).read_text(encoding="utf-8").splitlines()
        first = max(0, text.line - (1 if text.kind == "paragraph" else 4))
        print(f"--- {number}. {text.kind} {text.path}:{text.line}", *lines[first : text.line + 7], sep="\n")


if __name__ == "__main__":
    main()
