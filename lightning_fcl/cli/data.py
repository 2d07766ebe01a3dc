"""`lightning-fcl data`: which data sets there are, whether they can be used, and how to get them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Look after data sets."
    parser.add_argument("action", choices=("list", "check", "fetch"))
    parser.add_argument("names", nargs="*", help="data sets (default: all)")
    parser.add_argument("--root", help="folder of the data sets (default: $LIGHTNING_FCL_DATA)")


def run(options: Namespace) -> None:
    from lightning_fcl.data import datasets

    known = datasets.describe()
    if options.action == "list":
        for description in known:
            print(f"{description.name:12} {description.content} ({description.size}; {description.licence})")
        return
    failed = []
    for name in options.names or [description.name for description in known]:
        try:
            if options.action == "fetch":
                datasets.fetch(name, options.root)
            print(f"{name:12} {datasets.check(name, options.root)}")
        except (ValueError, OSError) as error:
            failed.append(name)
            print(f"{name:12} {error}", file=sys.stderr)
    if failed:
        raise ValueError(f"{len(failed)} of the data sets cannot be used: {', '.join(failed)}.")
