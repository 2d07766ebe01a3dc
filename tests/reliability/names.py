"""Names that no file or message may bring: what leads out of a folder, and what may be taken for another name."""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from lightning_fcl.hub.sealed import seal
from lightning_fcl.zoo.entry import WEIGHTS

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

JSON = [value for value in STRANGE if not isinstance(value, bytes)]
WRITTEN = [name for name in TEXTS if not any("\ud800" <= sign <= "\udfff" for sign in name)]
FILES = [*WRITTEN, "model.safetensors ", "Model.safetensors", "config.json", "registry.json", "weights.pkl", ".lock"]
NO_DIGESTS = ["0" * 63, "0" * 65, "A" * 64, "g" * 64, "\uff10" * 64, "0" * 64 + "\n", "../" + "0" * 61]
NAME = "mlp.digits.flwf2t_replay"  # the entry that is changed


def _change(*place: str) -> Callable[[Any, object], None]:
    """Changes what lies deep in a registry."""

    def to(model: Any, value: object) -> None:
        for key in place[:-1]:
            model = model[key]
        model[place[-1]] = value

    return to


def _rename(model: Any, name: object) -> None:
    model["entry"]["files"][name] = model["entry"]["files"].pop(WEIGHTS)


def _add(model: Any, name: object) -> None:
    model["entry"]["files"][name] = {"size": 0, "sha256": "0" * 64}


DOORS: dict[str, tuple[Callable[[Any, object], None], list[Any]]] = {
    "another file": (_rename, FILES),
    "one file more": (_add, FILES),
    "a file's digest": (_change("entry", "files", WEIGHTS, "sha256"), [*WRITTEN, *JSON, *NO_DIGESTS]),
    "a file's size": (_change("entry", "files", WEIGHTS, "size"), [*(v for v in JSON if v != 0), "1", -(10**40)]),
    "what is told of a file": (_change("entry", "files", WEIGHTS), JSON),
    "the files": (_change("entry", "files"), JSON),
    "the configuration's digest": (_change("config", "sha256"), [*WRITTEN, *JSON, *NO_DIGESTS, "0" * 64]),
    "the configuration": (_change("config"), JSON),
    "the folder": (_change("folder"), [*WRITTEN, *JSON, "mlp.other", f"{NAME}@2", f"{NAME}@1/../.."]),
    "the name": (_change("entry", "name"), [*WRITTEN, *JSON, f"{NAME}/..", "MLP.digits"]),
    "the version": (_change("entry", "version"), [*JSON, "1", -(10**40)]),
    "the entry": (_change("entry"), JSON),
}
"""What of a registry's first entry is changed, and what to; all of it is to be refused."""


def hashed(data: bytes) -> str:
    """SHA-256, 64 digits."""
    return hashlib.sha256(data).hexdigest()


def evil_registry(content: Mapping[str, Any], door: str, value: object) -> bytes:
    """A registry that is changed, by one who makes all else in it agree."""
    changed = copy.deepcopy(dict(content))
    model = changed["models"][0]
    DOORS[door][0](model, value)
    if "configuration" not in door:
        data = seal(model["entry"] if isinstance(model["entry"], dict) else {}).encode()
        model["config"] = {"size": len(data), "sha256": hashed(data)}
    return seal(changed).encode()


def mixed(rng: random.Random) -> str:
    """A name of parts, most of which lead elsewhere: but where it was written to, no further than a case's folder."""
    parts = (
        "..",
        ".",
        "/",
        "\\",
        "a",
        "x.png",
        "..",
        "/",
        "~",
        "C:",
        "\0",
        "\uff0e\uff0e",
        "%2e%2e",
        " ",
        "e\u0301",
        "nul",
    )
    return "".join(rng.choices(parts, k=rng.randrange(1, 6))).lstrip("/")
