"""Property tests of LaTeX and Markdown: escaped names, code and tables."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lightning_fcl.evaluation.markup import LATEX, MARKUPS
from lightning_fcl.evaluation.run_table import RunTable

NAMES = st.text("ab_%&#${}\\~^<>|`\"'*[]-!@ \n\té±1", max_size=12)
COMMANDS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    r"\textasciigrave{}": "`",
    r"\textquotedbl{}": '"',
    r"$\pm$": "±",
    **{f"\\{character}": character for character in "&%$#_{}"},
    "-{}": "-",
}


def typeset(latex):
    """Return the text that LaTeX would show. Raise ValueError for an unescaped special character."""
    shown, position = "", 0
    while position < len(latex):
        command = next((command for command in COMMANDS if latex.startswith(command, position)), None)
        if command is None and latex[position] in '&%$#_{}\\~^<>|`"':
            raise ValueError(latex[position:])
        if latex.startswith("--", position):
            raise ValueError("a dash")
        shown += latex[position] if command is None else COMMANDS[command]
        position += len(command or "1")
    return shown


@given(NAMES)
def test_latex_text_is_typeset_as_given(name):
    assert typeset(LATEX.text(name)) == " ".join(name.split())
    assert LATEX.code(name) == rf"\texttt{{{LATEX.text(name)}}}"


@given(st.lists(st.lists(NAMES, min_size=2, max_size=2), min_size=1, max_size=4))
def test_latex_grid_has_one_line_per_row_and_no_optional_argument(lines):
    cells = [[LATEX.text(cell) for cell in line] for line in lines]
    rows = LATEX.grid(["a", "b"], cells).splitlines()[4:-2]
    assert len(rows) == len(lines)
    for row, (first, second) in zip(rows, cells, strict=True):
        assert row.removeprefix("{}") == rf"{first} & {second} \\" and not row.startswith(("[", "*"))


def markdown_text(source):
    """Return the text of the only paragraph that CommonMark reads, without code marks."""
    tokens = MarkdownIt().enable("table").parse(source)
    inline = [token for token in tokens if token.type == "inline"]
    assert len(inline) == 1 and tokens[0].type == "paragraph_open"
    assert {child.type for child in inline[0].children} <= {"text", "text_special", "code_inline"}, inline
    return "".join(child.content for child in inline[0].children)


@given(NAMES)
def test_markdown_text_and_code_are_shown_as_given(name):
    markup, shown = MARKUPS["markdown"], " ".join(name.split())
    assert markdown_text(f"x{markup.text(name)}x") == f"x{shown}x"
    if shown:
        assert markdown_text(f"x {markup.code(name)} x") == f"x {shown} x"
    rendered = MarkdownIt().enable("table").parse(markup.grid(["a", "b"], [[markup.code(name), markup.text(name)]]))
    cells = [token for token in rendered if token.type == "inline"]
    assert len(cells) == 4
    assert "".join(child.content for child in cells[2].children) == shown
    assert "".join(child.content for child in cells[3].children) == shown


@pytest.mark.parametrize("table_format", ["latex", "markdown"])
def test_run_table_with_special_names_keeps_columns(table_format):
    names = ["[a] & b", "*x*", "a | b", "%", "_"]
    run = {"seed": 0, "metrics": {"final_accuracy/server": 0.5}, "record": {}}
    text = RunTable.from_runs({name: [run] for name in names}, ["final_accuracy/server"]).render(table_format)
    mark = r"(?<!\\)&" if table_format == "latex" else r"(?<!\\)\|"
    rows = [line for line in text.splitlines() if "0.500" in line]
    assert [len(re.findall(mark, row)) for row in rows] == [2 if table_format == "latex" else 4] * len(names)
    assert not any(row.startswith(("[", "*")) for row in rows)


def test_comment_cannot_end_early():
    assert MARKUPS["markdown"].comment("a --> b\n<!-- c").count("--") == 2
    assert "\n" not in LATEX.comment("a\nb")
