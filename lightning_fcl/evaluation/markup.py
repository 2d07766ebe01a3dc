"""LaTeX and Markdown text: escaped text, code, citations, paragraphs and tables."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from lightning_fcl.evaluation.table import markdown_table

TextFormat: TypeAlias = Literal["latex", "markdown"]
"""Formats of a text for a paper."""

_LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_MARKDOWN_CHARACTERS = re.compile(r"([\\`*_{}\[\]<>#~$^@!])")


class Markup(ABC):
    """A text format. The functions take plain text, and return text in this format."""

    @abstractmethod
    def text(self, text: str) -> str:
        """Return plain text with escaped special characters, in one line."""

    @abstractmethod
    def code(self, text: str) -> str:
        """Return a name or a value of a program."""

    @abstractmethod
    def cite(self, keys: Sequence[str]) -> str:
        """Return a citation, with a space before it. Empty without keys."""

    @abstractmethod
    def paragraph(self, title: str, sentences: Iterable[str]) -> str:
        """Return a paragraph with a title. ``sentences`` are in this format already."""

    @abstractmethod
    def table(self, caption: str, body: str) -> str:
        """Return a table with a caption.

        Args:
            caption: The caption, in this format.
            body: The lines of the table, as `grid` returns them.
        """

    @abstractmethod
    def grid(self, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
        """Return the head and the lines of a table. The cells are in this format already."""

    @abstractmethod
    def comment(self, text: str) -> str:
        """Return a comment, which is not visible in the typeset document."""

    @abstractmethod
    def bibliography(self, entries: str) -> str:
        """Return BibTeX entries as a part of the document."""


class Latex(Markup):
    r"""LaTeX with the package ``booktabs``.

    Example:
        >>> Latex().text("a_b%&#")
        'a\\_b\\%\\&\\#'
    """

    def text(self, text: str) -> str:
        escaped = "".join(_LATEX_CHARACTERS.get(character, character) for character in _one_line(text))
        # LaTeX joins two hyphens to a dash.
        return re.sub(r"-(?=-)", "-{}", escaped)

    def code(self, text: str) -> str:
        return f"\\texttt{{{self.text(text)}}}"

    def cite(self, keys: Sequence[str]) -> str:
        return f"~\\cite{{{','.join(keys)}}}" if keys else ""

    def paragraph(self, title: str, sentences: Iterable[str]) -> str:
        return f"\\paragraph{{{self.text(title)}.}}\n" + "\n".join(sentences)

    def table(self, caption: str, body: str) -> str:
        return f"\\begin{{table}}[ht]\n\\centering\n\\caption{{{caption}}}\n\\small\n{body.rstrip()}\n\\end{{table}}"

    def grid(self, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
        # The braces protect a first cell that starts with `[` or `*`, which would be arguments of the line break.
        rows = [("{}" if line[0].startswith(("[", "*")) else "") + " & ".join(line) + r" \\" for line in [head, *lines]]
        body = "\n".join([r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"])
        return f"\\begin{{tabular}}{{{'l' * len(head)}}}\n{body}\n\\end{{tabular}}"

    def comment(self, text: str) -> str:
        return f"% {_one_line(text)}"

    def bibliography(self, entries: str) -> str:
        return f"% BibTeX entries. Save them in a .bib file.\n\n{entries}"


class Markdown(Markup):
    r"""Markdown with citations of Pandoc.

    Example:
        >>> Markdown().text("a_b*"), Markdown().cite(["li2020fedprox"])
        ('a\\_b\\*', ' [@li2020fedprox]')
    """

    def text(self, text: str) -> str:
        return _MARKDOWN_CHARACTERS.sub(r"\\\1", _one_line(text))

    def code(self, text: str) -> str:
        text = _one_line(text)
        if not text:
            return ""
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence, pad = "`" * (longest + 1), " " if longest else ""
        return f"{fence}{pad}{text}{pad}{fence}"

    def cite(self, keys: Sequence[str]) -> str:
        return f" [{'; '.join(f'@{key}' for key in keys)}]" if keys else ""

    def paragraph(self, title: str, sentences: Iterable[str]) -> str:
        return f"**{self.text(title)}.**\n" + "\n".join(sentences)

    def table(self, caption: str, body: str) -> str:
        return f"{caption}\n\n{body.rstrip()}"

    def grid(self, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
        return markdown_table(head, lines)

    def comment(self, text: str) -> str:
        return f"<!-- {_one_line(text).replace('--', '- -')} -->"

    def bibliography(self, entries: str) -> str:
        return f"```bibtex\n{entries}\n```"


LATEX = Latex()
"""LaTeX with the package ``booktabs``."""

MARKUPS: dict[TextFormat, Markup] = {"latex": LATEX, "markdown": Markdown()}
"""The text formats by name."""


def _one_line(text: str) -> str:
    """Return a text with single spaces in place of white space, and without control characters."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())
