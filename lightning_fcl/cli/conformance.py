"""`lightning-fcl conformance`: tests of a method against the statements of its paper."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import InvalidValueError


class Conformance(Command):
    """Check an implementation of a method against the statements of its paper, on a small federation.

    lightning-fcl conformance FedProx          checks the implementation of this library
    lightning-fcl conformance my_methods.py    checks all methods in a file, and classes with the attribute `implements`
    lightning-fcl conformance my_methods.Prox  checks one class of a module that can be imported

    The attribute `implements` of a class names the method. By default, the name of the class is the name of the method.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "target", metavar="METHOD_OR_FILE", help="check this method: a name, a Python file or a class path"
        )
        parser.add_argument("--method", metavar="NAME", help="set the name of the method that the class implements")

    def run(self, options: Namespace) -> None:
        from lightning_fcl.conformance import get_classes, run_statements

        num_failed = num_tried = 0
        for kind in get_classes(options.target, options.method):
            for statement, outcome in run_statements(kind):
                num_failed += outcome.result == "fails"
                num_tried += outcome.result != "not tried"
                print(f"{kind.__name__:16} {statement}: {outcome}", flush=True)
        print(f"{num_tried - num_failed} of {num_tried} statements hold.")
        if num_failed:
            raise InvalidValueError(f"Expected every statement to hold, but {num_failed} of {num_tried} failed.")
