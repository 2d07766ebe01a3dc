"""`lightning-fcl leaderboard`: the methods of today under the same protocols, with what each costs."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from lightning_fcl.cli.jobs import at_least_one
from lightning_fcl.cli.reproduce import run_rows
from lightning_fcl.errors import did_you_mean
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.table import Table, write_table
from lightning_fcl.running.rows import expanded, paper_folder, protocols_of, read_rows, slug


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Run methods under the same protocols, and write a table and a picture of each protocol."
    add = parser.add_argument
    add("--protocols", help='beginnings of their names, separated by commas, as in "P4,P7" (default: all)')
    add("--methods", help="names of methods, separated by commas (default: all)")
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0..N-1 (default: 3)")
    add("--out", type=Path, default=Path("runs/leaderboard"), help="folder (default: runs/leaderboard)")
    add("--workers", type=int, metavar="N", help="processes (default: one per core)")
    add(
        "--search",
        action="store_true",
        help="search for the methods' settings, to be put into recipes/leaderboard/best",
    )
    add("--finished", action="store_true", help="run nothing: the tables are of the runs that are finished")


def run(options: Namespace) -> None:
    """Run each method under each protocol, and write what they came to; cut off, the same command goes on."""
    from lightning_fcl.evaluation.charts import write_png  # what draws takes a second to import
    from lightning_fcl.evaluation.leaderboard import board, picture, standing

    at_least_one(seeds=options.seeds, workers=options.workers)
    folder, out = paper_folder("leaderboard"), options.out
    content = read_rows(folder)
    protocols = protocols_of(content)
    wanted = _named(options.protocols, [*protocols], "protocols", beginnings=True)
    every = list(dict.fromkeys(method for name in wanted for method in protocols[name]))
    methods = _named(options.methods, every, "methods")
    if options.search:
        entries = expanded(content)
        searches = {method: file for method in methods if (file := entries[method].search) is not None}
        search_settings(folder, searches, out / "searches", options.workers)
        return
    rows = [f"{name} {method}" for name in wanted for method in protocols[name] if method in methods]
    jobs = run_rows(folder, rows, "paper", options.seeds, None, out, options.workers, options.finished)
    runs = [job.results() for of in jobs.values() for job in of]
    words = [f"--{name}={given}" for name in ("protocols", "methods") if (given := getattr(options, name))]
    command = shlex.join(["lightning-fcl", "leaderboard", *words, "--seeds", str(options.seeds)])
    table = Table.of([one | {"metrics": standing(one)} for one in runs], "leaderboard", "paper", command)
    as_json, _ = write_table(out, table)
    for name in wanted:
        if shown := board(table, name, protocols[name]):
            print(f"{name}\n\n{shown}\n")
        if drawn := picture(table, name, protocols[name]):
            write_png(out / f"{slug(name)}.png", drawn)
    print(f"{len(runs)} runs. Table: {as_json}; pictures: {out}/*.png; of each run: {out}/*/seed-*/report.html")


def search_settings(folder: Path, searches: Mapping[str, str], out: Path, workers: int | None) -> None:
    """Run each method's search, a file of the folder; ``out/best`` has a recipe of each."""
    from lightning_fcl.cli import tune  # with Optuna, which takes a second to import

    (out / "best").mkdir(parents=True, exist_ok=True)
    parser = ArgumentParser()
    tune.arguments(parser)
    for method, file in searches.items():
        print(f"{method}: {file}")
        words = [str(folder / file), "--row", method, "--out", str(out / slug(method))]
        tune.run(parser.parse_args(words + ([] if workers is None else ["--workers", str(workers)])))
        again = shlex.join(["lightning-fcl", "leaderboard", "--search", "--methods", method])
        best = (out / slug(method) / "best.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
        recipe = "".join(line for line in best if not line.startswith("#"))
        write_whole(out / "best" / f"{slug(method)}.yaml", f"# The best of {file}. {again}\n{recipe}")
    print(f"The best of each search: {out / 'best'}")


def _named(text: str | None, known: list[str], what: str, beginnings: bool = False) -> list[str]:
    """The known names that are asked for, by their beginnings if so; all of them if none are."""
    if text is None:
        return known
    found: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        fits = [name for name in known if name == word or (beginnings and name.startswith(word))]
        if not fits:
            raise ValueError(f"Expected `{what}` among {', '.join(known)} but got {word}.{did_you_mean(word, known)}")
        found += fits
    return list(dict.fromkeys(found))
