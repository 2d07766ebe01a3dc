"""Unsafe names in files and messages: paths outside the folder, and names that can be confused with other names."""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

from lightning_fcl.zoo.model_entry import WEIGHTS

UP = ("..", "../x", "../../x", "x/../../y", "./x", "x/./y", ".", "", "/", "x/", "x//y", "~/../../x", ".../x")
ABSOLUTE = (
    "/no/such/x",
    "//no/such/x",
    "/dev/null/x",
    "C:/x",
    "c:x",
    "C:\\x",
    "\\\\host\\share\\x",
    "\\\\?\\C:\\x",
    "file:///x",
)
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

WRITTEN = [name for name in TEXTS if not any("\ud800" <= sign <= "\udfff" for sign in name)]
FILES = [*WRITTEN, "model.safetensors ", "Model.safetensors", "files.txt", "registry.txt", "weights.pkl", ".lock"]
NO_DIGESTS = ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "\uff10" * 64, "0" * 64 + "\n", "../" + "0" * 61, "0" * 64]
NAME = "mlp.digits.flwf2t_replay"  # Name of the zoo entry that tests change.


def _digest_of(name: str) -> Callable[[str, str], str]:
    return lambda text, value: text.replace(_digest(text, name), value)


DOORS: dict[str, tuple[str, Callable[[str, str], str], list[str]]] = {
    "another file": ("files.txt", lambda text, name: text.replace(WEIGHTS, name), FILES),
    "one file more": ("files.txt", lambda text, name: f"{text}{name} {'0' * 64}\n", FILES),
    "a file's digest": ("files.txt", _digest_of(WEIGHTS), [*WRITTEN, *NO_DIGESTS]),
    "the list's digest": ("registry.txt", _digest_of(NAME), [*WRITTEN, *NO_DIGESTS]),
    "the folder": (
        "registry.txt",
        lambda text, name: text.replace(NAME, name),
        [*WRITTEN, f"{NAME}@2", f"{NAME}@1/../..", f"{NAME}/.."],
    ),
    "the name": (
        "config.json",
        lambda text, name: text.replace(f'"{NAME}"', json.dumps(name)),
        [*WRITTEN, "mlp.other"],
    ),
    "the version": (
        "config.json",
        lambda text, value: text.replace('"version": 1', f'"version": {value}'),
        ["0", "-1", "2", "1.5", "null", "[]", "{}", "true", '"x"'],
    ),
    "the configuration": (
        "config.json",
        lambda text, value: value,
        ["null", "[]", "3", '"x"', "{}", '{"x": "\\ud800"}', "[" * 100_000, "{"],
    ),
}
"""By name of the manipulation: the changed file, the function that changes its text, and invalid values.

Each value must raise an error.
"""


def _digest(text: str, name: str) -> str:
    return next(line.split(" ")[1] for line in text.splitlines() if line.startswith(name))


def hashed(data: bytes) -> str:
    """Return the SHA-256 digest as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def evil_zoo(zoo: Path, door: str, value: str) -> None:
    """Change one place in a zoo with a single entry. Update all digests, so that only the change is invalid."""
    name, change, _ = DOORS[door]
    path = zoo / name if name == "registry.txt" else zoo / NAME / name
    path.write_text(change(path.read_text(encoding="utf-8"), value), encoding="utf-8")
    if name == "config.json":
        _agree(zoo / NAME / "files.txt", "config.json", path)
    if name != "registry.txt":
        _agree(zoo / "registry.txt", f"{NAME}/files.txt", zoo / NAME / "files.txt")


def _agree(listing: Path, name: str, file: Path) -> None:
    text = listing.read_text(encoding="utf-8")
    listing.write_text(text.replace(_digest(text, name), hashed(file.read_bytes())), encoding="utf-8")
