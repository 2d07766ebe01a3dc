"""Documents in JSON that tell their own checksum, and are byte for byte as we write them: any change is seen."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SIZE = 10_000_000
"""Bytes that a document may have."""


def seal(content: Mapping[str, Any]) -> str:
    """A document as it is written: its text, and a checksum of it."""
    return _text({**content, "checksum": hashlib.sha256(_text(content).encode()).hexdigest()})


def unseal(data: bytes, name: object) -> dict[str, Any]:
    try:
        content: dict[str, Any] = {**json.loads(data)} if len(data) <= SIZE else {}
        content.pop("checksum", None)
        same = data == seal(content).encode()
    except (ValueError, TypeError, RecursionError):
        same, content = False, {}
    if not content:
        raise ValueError(f"Expected {name} to be a JSON object of at most {SIZE} bytes but it is not. Get it again.")
    if not same:
        raise ValueError(
            f"Expected {name} to be as it was written but its checksum is another: it is damaged, or was changed by "
            "hand. Get it again."
        )
    return content


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
