"""`lightning-fcl deploy`: a recipe as a Flower app, its clients' data as files, and the process that answers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

WHAT = """A recipe on real machines, over Flower.

  lightning-fcl deploy flower quickstart --out app      writes a Flower app, for `flwr run app`
  lightning-fcl deploy split quickstart --out shares    writes what each client of the recipe would have, a file each
  lightning-fcl deploy executor --runtime-api-address 127.0.0.1:9094 --insecure
                                                        answers for a SuperNode that was started with
                                                        --isolation process; takes flower-superexec's arguments
"""


def arguments(parser: ArgumentParser) -> None:
    parser.description = WHAT
    parser.add_argument("what", choices=("flower", "split", "executor"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="as `lightning-fcl fit` takes it")
    parser.add_argument("--out", type=Path, help="folder of the files (default: app, or shares)")
    parser.add_argument("--publisher", default="lightning-fcl", help="who publishes the app, for Flower")


def run(options: Namespace) -> None:
    if options.what == "executor":
        from lightning_fcl.deployment.resident import stay

        stay(options.words[1:])
        return
    out: Path = options.out or Path({"flower": "app", "split": "shares"}[options.what])
    kind = "*.toml" if options.what == "flower" else "*.npz"
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not any(out.glob(kind)))):
        raise ValueError(f"Expected a folder of its own at {out} but it holds something else. Choose another by --out.")
    from lightning_fcl.running.fit import resolve_recipe
    from lightning_fcl.running.parts import read_parts
    from lightning_fcl.running.rows import find_recipes

    recipe = find_recipes(options.recipes)
    if options.what == "flower":
        from lightning_fcl.deployment.flower import write_app

        resolved = resolve_recipe(["fit", *recipe.command_words, *options.more])
        files = write_app(resolved, out, Path(options.recipes[-1]).stem, options.publisher)
    else:
        from lightning_fcl.deployment.own_data import write_split

        files = write_split(read_parts(recipe.configs, [*recipe.fit_words, *options.more]).datamodule, out)
    print("\n".join(map(str, files)))
