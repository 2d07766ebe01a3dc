"""`lightning-fcl deploy`: deployment of a recipe on real machines with Flower."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.runs.paper_rows import find_recipes


class Deploy(Command):
    """Deploy a recipe on real machines with Flower.

    lightning-fcl deploy flower quickstart --out app      writes a Flower app, for `flwr run app`
    lightning-fcl deploy split quickstart --out shares    writes the data of each client to a file
    lightning-fcl deploy executor --runtime-api-address 127.0.0.1:9094 --insecure
                                                          runs the apps of a SuperNode that was started with
                                                          --isolation process. Takes the arguments of
                                                          flower-superexec.
    lightning-fcl deploy clock --superlink 127.0.0.1:18000 --insecure
                                                          compares the clock of this machine with the SuperLink's clock
    """

    takes_settings = True
    forwards_arguments = ("executor",)

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=("flower", "split", "executor", "clock"))
        parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="deploy this recipe: a name or a YAML file")
        parser.add_argument("--out", type=Path, help="set the output folder (default: app, or shares for `split`)")
        parser.add_argument("--publisher", default="lightning-fcl", help="set the publisher of the Flower app")
        parser.add_argument("--superlink", metavar="HOST:PORT", help="set the SuperLink's address, for `clock`")
        trust = parser.add_mutually_exclusive_group()
        trust.add_argument(
            "--root-certificates", type=Path, metavar="FILE", help="trust these certificates, for `clock`"
        )
        trust.add_argument("--insecure", action="store_true", help="connect without TLS, for `clock`")

    def run(self, options: Namespace) -> None:
        if options.what == "clock":
            from lightning_fcl.deployment.clock import check_clock

            seconds = check_clock(options.superlink, options.root_certificates, options.insecure)
            print(
                f"Clock of this machine minus clock of the SuperLink: {seconds:+.0f} s. Flower accepts this difference."
            )
            return
        if options.what == "executor":
            from lightning_fcl.deployment.node import run_executor

            run_executor(options.words[1:])
            return
        out: Path = options.out or Path({"flower": "app", "split": "shares"}[options.what])
        kind = "*.toml" if options.what == "flower" else "*.npz"
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not any(out.glob(kind)))):
            raise InvalidValueError(
                f"Expected {out} to be an empty folder, or the output of an earlier `deploy {options.what}`, but it is "
                "neither.",
                hint="Use an empty folder with `--out`.",
            )
        from lightning_fcl.runs.fit import resolve_recipe
        from lightning_fcl.runs.loaded_recipe import load_recipe

        recipe = find_recipes(options.recipes).with_layers(*options.layers)
        if options.what == "flower":
            from lightning_fcl.deployment.flower import write_app

            files = write_app(resolve_recipe(recipe), out, Path(options.recipes[-1]).stem, options.publisher)
        else:
            from lightning_fcl.deployment.node_data import write_split

            files = write_split(load_recipe(recipe).datamodule, out)
        print("\n".join(map(str, files)))
