"""Names that no file or message may bring: what leads out of a folder, and what may be taken for another name."""

import itertools
import unicodedata

UP = ("..", "../x", "../../x", "x/../../y", "./x", "x/./y", ".", "", "/", "x/", "x//y", "~/../../x", ".../x")
ABSOLUTE = ("/x", "//x", "/etc/passwd", "C:/x", "c:x", "C:\\x", "\\\\host\\share\\x", "\\\\?\\C:\\x", "file:///x")
UNPRINTED = tuple(f"a{chr(code)}b" for code in (*range(32), 127, 133, 160, 0x200B, 0x200E, 0x2028, 0x202E, 0xFEFF))
FORBIDDEN = tuple(
    f"{before}{sign}{after}" for sign in '\\:*?"<>|' for before, after in itertools.product(("a", ""), "b.")
)
ENDS = tuple(f"{name}{end}" for name in ("a", "a.png", "..", "a/b") for end in (" ", ".", "  ", ". ", " ."))
DEVICES = tuple(
    name + end
    for device in ("con", "prn", "aux", "nul", "com1", "lpt9")
    for name in (device, device.upper(), f"x/{device}")
    for end in ("", ".png", " .png", ".tar.gz")
)
TWINS = (
    *(unicodedata.normalize("NFD", name) for name in ("é", "Å/x", "ñandú.png", "각")),
    *("．．", "．．/x", "..／x", "／x", "a＼b", "ｃon", "‥", "…/x", "℀", "ﬁle", "a²", "№1", "com¹"),  # noqa: RUF001
)
LONG = ("a" * 300, "é" * 150, f"x/{'a' * 300}", "a" * 70_000)
BROKEN = ("\ud800", "a\udcffb", "a\uffff", "a\U000e0001")
STRANGE = (None, True, 0, -1, 1.5, float("nan"), b"x", [], ["x"], {}, {"x": "y"}, ("..",))

TEXTS = tuple(dict.fromkeys((*UP, *ABSOLUTE, *UNPRINTED, *FORBIDDEN, *ENDS, *DEVICES, *TWINS, *LONG, *BROKEN)))
EVIL = (*TEXTS, *STRANGE)
