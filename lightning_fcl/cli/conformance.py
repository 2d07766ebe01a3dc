"""`lightning-fcl conformance`: whether an implementation of a method does what its paper says."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

_MORE = """
  lightning-fcl conformance FedProx          the library's
  lightning-fcl conformance my_methods.py    every class of a file of yours that is a method, or has `claims`
  lightning-fcl conformance my_methods.Prox  one of them, of a module that can be imported
"""


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Try an implementation of a method against what its paper states, on a small federation."
    parser.epilog = _MORE
    parser.add_argument("target", metavar="METHOD_OR_FILE", help="a method's name, a Python file, or a class's path")
    parser.add_argument("--claims", metavar="NAME", help="whose statements to try (default: its `claims`, or its name)")


def run(options: Namespace) -> None:
    from lightning_fcl.conformance import classes_of, try_statements

    failed = tried = 0
    for kind in classes_of(options.target, options.claims):
        for statement, outcome in try_statements(kind):
            failed += outcome.startswith("fails")
            tried += not outcome.startswith("not tried")
            print(f"{kind.__name__:16} {statement}: {outcome}", flush=True)
    print(f"{tried - failed} of {tried} statements hold.")
    if failed:
        raise ValueError(f"Expected every statement to hold but {failed} of {tried} do not.")
