"""The command `lightning-fcl`: fit recipes, reproduce papers, look after data."""

from __future__ import annotations

import argparse
import os
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

COMMANDS = """commands:
  fit         train what a recipe says:    lightning-fcl fit --config recipes/quickstart.yaml
  test        test a checkpoint:           lightning-fcl test --config RECIPE --ckpt_path CHECKPOINT
  reproduce   run a paper's recipes:       lightning-fcl reproduce flwf --seeds 5
  tune        search for settings:         lightning-fcl tune SEARCH.yaml --trials 50
  device-report   what a microcontroller would need to run a recipe, without training
  export      a run's model as ONNX:        lightning-fcl export runs/fit
  demo        the quickstart, compared with plain fine-tuning
  data        list, check or fetch data sets

`lightning-fcl COMMAND --help` tells more.
Data sets lie below $LIGHTNING_FCL_DATA (default ~/.cache/lightning-fcl/data).
"""


FIT = """Every argument of the Trainer, the model and the data can follow, as in
  lightning-fcl fit --config recipes/quickstart.yaml --trainer.max_epochs 3 --data.clients 20
  lightning-fcl fit --print_config      prints a recipe with every default
  lightning-fcl fit --help.all          lists them all
"""
TUNE = """A search file:
  configs: [base.yaml, more.yaml]      # recipes, relative to this file, later ones over earlier ones
  objective: final_accuracy/server     # one of the metrics in results.json
  direction: maximize                  # or minimize
  measure_on: validation               # samples of the objective; data.validation must be above 0
  sampler: random                      # or grid, or tpe
  trials: 100                          # for grid: all of it by default
  seeds: 1                             # seeds per trial; their mean counts
  space:                               # what `fit` would take as --PATH VALUE
    data.batch_size: [16, 32]
    model.init_args.optimizer.init_args.lr: {low: 1e-4, high: 1e-1, log: true}   # or step: 0.01
    trainer.callbacks.FLwF2T.alpha: {low: 0.0, high: 1.0}    # an argument of the recipe's callback of that class
A search that was cut off continues. Its results: best.yaml, trials.csv, trials.png, and a folder per trial and seed.
"""
DEVICE = """M_F is what is frozen (int8), M_T what is trained (fp32). A recipe freezes a part by declaring it:
  trainer.strategy.init_args.reductions: {"model.backbone.*": fixed}
Devices and links are in lightning_fcl/device/profiles.yaml, which also says how times are estimated. A YAML file of
your own has the entries of one of them.
"""
RAW = argparse.RawDescriptionHelpFormatter


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command but `fit` and `test`, which are Lightning's."""
    parser = argparse.ArgumentParser(
        "lightning-fcl",
        description="Federated continual learning for PyTorch Lightning.",
        epilog=COMMANDS,
        formatter_class=RAW,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in (("fit", "Train what a recipe says."), ("test", "Test a checkpoint.")):
        command = commands.add_parser(name, help=argparse.SUPPRESS, description=what, epilog=FIT, formatter_class=RAW)
        command.add_argument("--config", action="append", help="a recipe; later ones go over earlier ones")
        command.add_argument("--out", help="folder of the results (default: runs/fit)")
        command.add_argument("--seed_everything", type=int, help="seed of everything (default: 0)")
        command.add_argument("--ckpt_path", help="checkpoint to continue from, or to test")
    reproduce = commands.add_parser("reproduce", help=argparse.SUPPRESS, description="Run a paper's recipes.")
    reproduce.add_argument("paper", help="name of a folder of recipes, as in: flwf")
    reproduce.add_argument("--rows", help="rows of the paper's table, separated by commas (default: all)")
    reproduce.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0..N-1 (default: 1)")
    reproduce.add_argument(
        "--scale", choices=("smoke", "small", "paper"), default="paper", help="size of the runs (default: paper)"
    )
    reproduce.add_argument("--out", type=Path, help="folder of the results (default: runs/PAPER-SCALE)")
    reproduce.add_argument("--workers", type=int, default=None, metavar="N", help="processes (default: one per core)")
    tune = commands.add_parser(
        "tune",
        help=argparse.SUPPRESS,
        description="Search for the settings of a recipe.",
        epilog=TUNE,
        formatter_class=RAW,
    )
    tune.add_argument("search", type=Path, metavar="SEARCH.yaml", help="what to search for, and where")
    tune.add_argument("--out", type=Path, help="folder of the results (default: runs/tune-SEARCH)")
    tune.add_argument("--trials", type=int, metavar="N", help="number of trials (default: that of the search file)")
    tune.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    tune.add_argument("--seed", type=int, default=0, help="seed of the settings drawn (default: 0)")
    tune.add_argument("--restart", action="store_true", help="delete the trials that are there and begin anew")
    export = commands.add_parser(
        "export", help=argparse.SUPPRESS, description="Write a run's model as files for devices, compared with PyTorch."
    )
    export.add_argument("run", type=Path, metavar="RUN", help="folder of a run: what was --out of `fit`")
    export.add_argument("--format", choices=("onnx", "executorch"), default="onnx", help="(default: onnx)")
    export.add_argument("--out", type=Path, help="folder of the files (default: RUN/export)")
    device = commands.add_parser(
        "device-report",
        help=argparse.SUPPRESS,
        description="What a microcontroller would need to run a recipe: nothing is trained.",
        epilog=DEVICE,
        formatter_class=RAW,
    )
    device.add_argument("recipes", nargs="*", metavar="RECIPE.yaml", help="recipes; later ones go over earlier ones")
    device.add_argument("--config", action="append", default=[], help="a recipe, as `fit` takes it; behind the others")
    device.add_argument("--profile", default="gap9-lpm", help="device, or a YAML file of yours (default: gap9-lpm)")
    device.add_argument("--link", default="uwb-loco", help="link, or a YAML file of yours (default: uwb-loco)")
    device.add_argument("--nodes", type=int, metavar="N", help="nodes of a round (default: the recipe's, or 3)")
    device.add_argument("--samples", type=int, metavar="N", help="samples of an epoch (default: the recipe's, or 28)")
    device.add_argument("--input", metavar="1,64,48", help="shape of a sample (default: that of the recipe's data)")
    device.add_argument("--out", type=Path, help="folder for device.json and device.md (default: none)")
    demo = commands.add_parser("demo", help=argparse.SUPPRESS, description="Run and compare the quickstart.")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results")
    data = commands.add_parser("data", help=argparse.SUPPRESS, description="Look after data sets.")
    data.add_argument("action", choices=("list", "check", "fetch"))
    data.add_argument("names", nargs="*", help="data sets (default: all)")
    data.add_argument("--root", help="folder of the data sets (default: $LIGHTNING_FCL_DATA)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line.

    Args:
        arguments: The words after ``lightning-fcl``; default: those of this process.

    Raises:
        SystemExit: With code 2 and one message if the input is at fault.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    options, _ = (
        parser.parse_known_args(words) if words[:1] in (["fit"], ["test"]) else (parser.parse_args(words), None)
    )
    try:
        if options.command in ("fit", "test"):
            from lightning_fcl.cli.run import run

            checkpoint = Path(options.ckpt_path or "")
            if checkpoint.is_file() and not zipfile.is_zipfile(checkpoint):
                raise ValueError(
                    f"Expected `ckpt_path` to be a whole checkpoint but {checkpoint} is cut off, or none. Continue "
                    "from an earlier one."
                )
            run([word.replace("--help.all", "--help") for word in words])
        elif options.command == "reproduce":
            from lightning_fcl.cli.reproduce import reproduce

            rows = [row.strip() for row in options.rows.split(",")] if options.rows else None
            reproduce(options.paper, rows, options.seeds, options.scale, options.out, options.workers)
        elif options.command == "tune":
            from lightning_fcl.cli.tune import tune

            tune(options.search, options.out, options.trials, options.workers, options.seed, options.restart)
        elif options.command == "export":
            from lightning_fcl.device.export import export_run

            export_run(options.run, options.out, options.format)
        elif options.command == "device-report":
            from lightning_fcl.device.report import parse_shape, report_recipe

            shape = parse_shape(options.input) if options.input is not None else None
            recipes = [*options.recipes, *options.config]
            report_recipe(recipes, options.profile, options.link, options.nodes, options.samples, shape, options.out)
        elif options.command == "demo":
            from lightning_fcl.cli.reproduce import demo

            demo(options.out)
        else:
            _data(options.action, options.names, options.root)
    except KeyboardInterrupt:
        parser.exit(130, "lightning-fcl: interrupted. `reproduce` and `tune` go on where they were.\n")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("LIGHTNING_FCL_TRACEBACK"):
            raise
        where = "(LIGHTNING_FCL_TRACEBACK=1 shows where it came from.)"
        parser.exit(2, f"lightning-fcl: error: {_plain(str(error))}\n{where}\n")


def _plain(message: str) -> str:
    """A message without jsonargparse's account of all the types that an argument might have had.

    Example:
        >>> _plain("Does not validate against any of the Union subtypes. Errors: - Expected `rho` to be above 0.")
        'Expected `rho` to be above 0.'
    """
    reasons = re.findall("Expected `.*", message) if "Union subtypes" in message else []
    return reasons[0] if reasons else message


def _data(action: str, names: list[str], root: str | None) -> None:
    from lightning_fcl.data import datasets

    known = datasets.describe()
    if action == "list":
        for description in known:
            print(f"{description.name:12} {description.content} ({description.size}; {description.licence})")
        return
    failed = []
    for name in names or [description.name for description in known]:
        try:
            if action == "fetch":
                datasets.fetch(name, root)
            print(f"{name:12} {datasets.check(name, root)}")
        except (ValueError, OSError) as error:
            failed.append(name)
            print(f"{name:12} {error}", file=sys.stderr)
    if failed:
        raise ValueError(f"{len(failed)} of the data sets cannot be used: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
