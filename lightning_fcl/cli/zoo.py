"""`lightning-fcl zoo`: list, download, verify, use and publish pretrained networks."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import MissingValueError
from lightning_fcl.io.reading import read_text


class Zoo(Command):
    """List, verify, use and publish pretrained networks.

    The networks come from the package, and from the folder or URL in the environment variable LIGHTNING_FCL_ZOO.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        kinds = parser.add_subparsers(required=True, metavar="ls | info | download | verify | predict | push")
        ls = kinds.add_parser("ls", help="list the networks")
        ls.add_argument("pattern", nargs="?", default="*", help='select names, such as "*har*"')
        ls.set_defaults(do=_ls)
        info = kinds.add_parser("info", help="print the model card of a network")
        info.add_argument("name", metavar="NAME")
        info.set_defaults(do=_info)
        download = kinds.add_parser("download", help="download networks, and verify their files")
        download.add_argument("names", nargs="*", metavar="NAME")
        download.add_argument("--all", action="store_true", help="download all networks")
        download.add_argument("--to", type=Path, help="copy the networks to this registry folder")
        download.set_defaults(do=_download)
        verify = kinds.add_parser("verify", help="compare networks with their model cards")
        verify.add_argument("names", nargs="*", metavar="NAME", help="select networks (default: all)")
        verify.set_defaults(do=_verify)
        predict = kinds.add_parser("predict", help="predict the classes of samples in a CSV file")
        predict.add_argument("name", metavar="NAME")
        predict.add_argument("file", type=Path, metavar="FILE.csv", help="read one time step or one sample per line")
        predict.add_argument("--rate", type=float, help="give the sampling rate of the file in Hz, to check it")
        predict.add_argument("--json", action="store_true", help="print all probabilities, one line per sample")
        predict.set_defaults(do=_predict)
        push = kinds.add_parser("push", help="publish the network of a run")
        push.add_argument("run", type=Path, metavar="RUN", help="publish this run folder (--out of `fit`)")
        push.add_argument("--name", required=True, help="set the name, such as har_cnn.mydata.flwf")
        push.add_argument("--to", required=True, help="set the registry: a folder, or hf:ORGANIZATION/REPOSITORY")
        push.add_argument("--description", default="", help="describe the network in one sentence")
        push.add_argument("--weights-license", default="", help="set the license of the weights")
        push.add_argument("--data-license", default="", help="set the license of the data")
        push.add_argument("--limitation", action="append", default=[], help="describe a limitation; can be repeated")
        push.add_argument("--features", action="store_true", help="publish as a feature extractor, without class names")
        push.add_argument(
            "--numbered-classes", action="store_true", help="publish class numbers instead of class names"
        )
        push.set_defaults(do=_push)

    def run(self, options: Namespace) -> None:
        options.do(options)


def _ls(options: Namespace) -> None:
    from lightning_fcl.zoo.model_entry import WEIGHTS
    from lightning_fcl.zoo.registry import list_published

    for published in list_published(options.pattern).values():
        entry, weights = published.entry, published.registry_folder / published.folder / WEIGHTS
        accuracy = f"accuracy {entry.metrics['test_accuracy']:.3f}" if "test_accuracy" in entry.metrics else " " * 14
        size = f"{weights.stat().st_size / 1e6:7.2f} MB" if weights.is_file() else "    remote"
        print(f"{entry.full_name:40} {accuracy} {size}  {entry.description}")


def _info(options: Namespace) -> None:
    from lightning_fcl.zoo.model_entry import CARD
    from lightning_fcl.zoo.registry import resolve_folder

    print(read_text(resolve_folder(options.name) / CARD))


def _download(options: Namespace) -> None:
    from lightning_fcl.zoo.registry import copy_to_registry, list_models, resolve_folder

    names = list_models() if options.all else options.names
    if not names:
        raise MissingValueError(
            "Expected names to download, or --all, but got none.",
            hint="Pass a name from `lightning-fcl zoo ls`, or `--all`.",
        )
    for name in names:
        folder = resolve_folder(name)
        print(f"{name}: {copy_to_registry(folder, options.to) if options.to else folder}")


def _verify(options: Namespace) -> None:
    from lightning_fcl.zoo.registry import list_models
    from lightning_fcl.zoo.verifying import verify

    wrong = 0
    for name in options.names or list_models():
        try:
            verdict = verify(name)
        except FileNotFoundError as error:
            if options.names:
                raise
            print(f"{name}: not available ({error})", file=sys.stderr)
            continue
        accuracy_text = (
            "not measured: " + verdict.reason
            if verdict.measured_accuracy is None
            else f"{verdict.measured_accuracy:.4f}"
        )
        card = "none" if verdict.published_accuracy is None else f"{verdict.published_accuracy:.4f}"
        word = "matches its card" if verdict.is_reproduced else "DOES NOT MATCH ITS CARD"
        print(
            f"{verdict.name}: {word}; accuracy {accuracy_text} (card: {card}), largest difference of outputs "
            f"{verdict.difference:.1e}"
        )
        wrong += not verdict.is_reproduced
    if wrong:
        raise SystemExit(1)


def _predict(options: Namespace) -> None:
    from lightning_fcl.zoo.loading import load
    from lightning_fcl.zoo.pretrained import read_samples

    model = load(options.name)
    for number, prediction in enumerate(model.predict(read_samples(options.file, model.entry), options.rate)):
        if options.json:
            print(json.dumps({"sample": number, "label": prediction.label, "probabilities": prediction.probabilities}))
        else:
            print(f"{number}\t{prediction.label}\t{prediction.probability:.3f}")


def _push(options: Namespace) -> None:
    from lightning_fcl.zoo.publishing import publish

    terms = {"weights": options.weights_license, "data": options.data_license}
    license_terms = {name: text for name, text in terms.items() if text}
    publish_options = {"numbered_classes": options.numbered_classes, "features": options.features}
    location = publish(
        options.run, options.name, options.to, options.description, license_terms, options.limitation, **publish_options
    )
    setting, name = "", location
    if isinstance(location, Path):
        setting, name = f"LIGHTNING_FCL_ZOO={shlex.quote(str(options.to))} ", options.name
        print(f"{location} ({sum(file.stat().st_size for file in location.iterdir()) / 1e6:.2f} MB)")
    print(f'Load it: {setting}python -c "from lightning_fcl import zoo; zoo.load({name!r})"')
