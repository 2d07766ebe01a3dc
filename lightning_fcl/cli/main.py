"""The command `lightning-fcl`: it finds the command asked for, and says in one line what was wrong."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import sysconfig
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import ClassVar

from lightning_fcl import __version__
from lightning_fcl.errors import FileAccessError, LightningFCLError
from lightning_fcl.evaluation.results import CONFIG
from lightning_fcl.io.atomic import private_temporary_folder
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.library_errors import LibraryError, first_line, match_error
from lightning_fcl.runs.recipe import Recipe, Setting, read_recipe_file, take_settings
from lightning_fcl.runs.secret_values import secrets_of, text_without_secrets, words_without_secrets
from lightning_fcl.runs.signals import Stopped, exit_now, stop
from lightning_fcl.validation import did_you_mean


class Command(ABC):
    """A command, whose docstring is its help: the first line above its arguments, the rest below.

    Attributes:
        takes_settings: Whether every argument that a recipe holds can follow, as in ``--data.batch_size 16``.
        forwards_arguments: First words behind which all others are for another program.
    """

    takes_settings: ClassVar[bool] = False
    forwards_arguments: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Tell a parser what the command takes."""

    @abstractmethod
    def run(self, options: argparse.Namespace) -> None:
        """Do it. ``options.words`` is the command line, ``options.layers`` the files and settings of a recipe in it."""


# The class of a command, whose module is imported when it is asked for, and what it does.
COMMANDS = {
    "ls": ("list_command.Ls", "list recipes, methods, models, data sets, scenarios, or the zoo"),
    "cp": ("fit.Cp", "a recipe as one file of yours: lightning-fcl cp flwf/flwf-2t-ft my.yaml"),
    "validate": ("fit.Validate", "check a recipe, its data and its shapes, without training"),
    "fit": ("fit.Fit", "train what a recipe says:    lightning-fcl fit quickstart"),
    "test": ("fit.Test", "test a run's model:          lightning-fcl test runs/quickstart"),
    "report": ("report.Report", "one page of a run, or of several side by side: lightning-fcl report RUN RUN"),
    "reproduce": ("reproduce.Reproduce", "run a paper's recipes:       lightning-fcl reproduce flwf --seeds 5"),
    "leaderboard": (
        "leaderboard.Leaderboard",
        "methods under the same protocols: lightning-fcl leaderboard --protocols P4",
    ),
    "tune": ("tune.Tune", "search for settings:         lightning-fcl tune SEARCH.yaml --trials 50"),
    "edge-report": ("edge.DeviceReport", "what a microcontroller would need to run a recipe, without training"),
    "export": ("edge.Export", "a run's model as ONNX:        lightning-fcl export runs/fit"),
    "deploy": (
        "deploy.Deploy",
        "a recipe on real machines, over Flower: lightning-fcl deploy flower quickstart --out app",
    ),
    "conformance": ("conformance.Conformance", "whether an implementation of a method does what its paper states"),
    "zoo": ("zoo.Zoo", "published networks: list, verify, predict with, or publish"),
    "demo": ("demo.Demo", "the quickstart, compared with plain fine-tuning"),
    "data": (
        "data.Data",
        "list, verify or download data sets, or show who sees what when: lightning-fcl data show quickstart",
    ),
    "completion": ("completion.Completion", 'completion in bash or zsh:  eval "$(lightning-fcl completion bash)"'),
}
_FORESEEN = (LightningFCLError, ValueError, OSError, ModuleNotFoundError)
EPILOG = """
`lightning-fcl COMMAND --help` tells more.
Data sets lie below $LIGHTNING_FCL_DATA (default ~/.cache/lightning-fcl/data).
A `class_path` may name a class in a file of the working directory, as in my_model.MyNet.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line."""
    _open_standard_streams()
    try:
        try:
            _run_command(arguments)
        finally:
            _flush()
    except BrokenPipeError:
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except FileAccessError as error:
        sys.stderr.write(f"lightning-fcl: error: {error}\n")
        sys.exit(2)


def _run_command(arguments: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    raw = argparse.RawDescriptionHelpFormatter
    lines = [f"  {name:15} {what}" for name, (_, what) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "lightning-fcl",
        description="Federated continual learning for PyTorch Lightning.",
        epilog="\n".join(["commands:", *lines, EPILOG]),
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"lightning-fcl {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    if not words:
        parser.print_help()
        return
    command = parser.parse_args(words[:1]).command
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        parser.error(f"Expected COMMAND to be one of {', '.join(COMMANDS)} but got {command}.{hint}")
    if sys.flags.optimize > 1:
        message = "Expected Python with docstrings, from which charts and options are made, but got PYTHONOPTIMIZE=2."
        parser.exit(2, f"lightning-fcl: error: {message} Unset PYTHONOPTIMIZE, or set it to 1.\n")
    # Recipes name classes of the working directory, as under `python -m`; workers take it over. It comes last: a file
    # there stands in for no module that is installed. The recipe's own folder does not count, so that a `config.yaml`
    # means what the recipe meant.
    try:
        working_folder = str(Path.cwd())
    except FileNotFoundError:
        parser.exit(2, "lightning-fcl: error: Expected a working directory, but it was deleted. Go to another one.\n")
    if working_folder not in sys.path:
        sys.path.append(working_folder)
    command_parser = argparse.ArgumentParser(
        f"lightning-fcl {command}", formatter_class=raw, conflict_handler="resolve", allow_abbrev=False
    )
    with stop.installed():
        try:
            with private_temporary_folder(), ExitStack() as exit_stack:
                # Only the first of a federation's processes says what the command says; launchers number as PyTorch's.
                if any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")):
                    exit_stack.enter_context(redirect_stdout(exit_stack.enter_context(open(os.devnull, "w"))))
                selected_command = load_command(COMMANDS[command][0])
                command_parser.description, _, command_parser.epilog = (getdoc(selected_command) or "").partition(
                    "\n\n"
                )
                selected_command.arguments(command_parser)
                rest, layers = words[1:], list[Path | Setting]()
                if words[1:2] and words[1] in selected_command.forwards_arguments:
                    rest = words[1:2]
                elif selected_command.takes_settings:
                    rest, layers = take_settings(words[1:], command_parser._option_string_actions)
                for file in Recipe(tuple(layers)).files:
                    read_recipe_file(file)  # before anything is printed or imported
                if selected_command.takes_settings:
                    _set_matplotlib_folder()
                options = command_parser.parse_args(rest, argparse.Namespace(words=words[1:], layers=layers))
                selected_command.run(options)
            _flush()
        except Stopped as stopped:
            parser.exit(128 + stopped.number, f"lightning-fcl: {stopped.message}\n")
        except BrokenPipeError:  # who reads the output, such as `head`, wants no more of it
            _drop_output()
            parser.exit(128 + signal.SIGPIPE)
        except Exception as error:
            foreseen = isinstance(error, _FORESEEN)
            if stop.signal and not foreseen:
                # What was still to be done, with processes that were told to stop as well, has come to no end.
                exit_now(stop.signal, "stopped in the midst of a round. Go on from the newest checkpoint.")
            if os.environ.get("LIGHTNING_FCL_TRACEBACK"):
                raise
            if isinstance(error, MemoryError) or match_error(error, LibraryError.NO_MEMORY):
                need = "Expected more memory, but the machine or a limit has none left. Raise the limit (ulimit -v)"
                parser.exit(2, f"lightning-fcl: error: {need}, or use fewer --workers or a smaller `batch_size`.\n")
            if not foreseen:
                parser.exit(1, _write_traceback(error, words))
            traceback_hint = "(LIGHTNING_FCL_TRACEBACK=1 shows where it came from.)"
            parser.exit(2, _without_secrets(f"lightning-fcl: error: {error}\n{traceback_hint}\n", words))


def _open_standard_streams() -> None:
    """Open the null device in place of a standard stream that is closed, so that no other file takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _set_matplotlib_folder() -> None:
    """Let Matplotlib, which other packages import, write to the cache, unless the user has settings for it."""
    if "MPLCONFIGDIR" in os.environ or Path("~/.config/matplotlib").expanduser().exists():
        return
    folder = cache_folder() / "matplotlib"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir(), "matplotlib")
        folder.mkdir(exist_ok=True)
    os.environ["MPLCONFIGDIR"] = str(folder)


def _drop_output() -> None:
    """Send the rest of the output to the null device. Otherwise, Python fails to write it when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    """Write what was printed.

    Raises:
        BrokenPipeError: If the reader of the output, such as ``head``, has ended.
        FileAccessError: If the output cannot be written.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise FileAccessError(
            f"Expected to write to standard output but got: {error}.", hint="Redirect the output to another file."
        ) from error


def load_command(path: str) -> Command:
    """The command of a class, as in ``show.Ls``."""
    module, _, name = path.partition(".")
    command: Command = getattr(import_module(f"lightning_fcl.cli.{module}"), name)()
    return command


def _write_traceback(error: Exception, words: Sequence[str]) -> str:
    """Return the message about an unexpected error: where it was raised, where its traceback is, and what to do."""
    environment = f"lightning-fcl {__version__}, Python {platform.python_version()}, {platform.platform()}"
    with tempfile.NamedTemporaryFile(
        "w", prefix="lightning-fcl-error-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        command = shlex.join(words_without_secrets(words)[0])
        text = f"lightning-fcl {command}\n{environment}\n\n{''.join(traceback.format_exception(error))}"
        file.write(_without_secrets(text, words))
    origin = _origin(error)
    return (
        f"lightning-fcl: error: an unexpected {type(error).__name__}: {_without_secrets(first_line(error), words)}\n"
        f"It was raised in {origin.filename}, line {origin.lineno}. Its traceback is in {file.name}. If the file is "
        "yours, correct it. Otherwise please report it as an issue of lightning-fcl, with the traceback.\n"
    )


def _origin(error: Exception) -> traceback.FrameSummary:
    """Return the place of an error: the last one in a file of the user, or the last one if no such file is involved."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")] + [
        str(Path(__file__).parents[1])
    ]
    user_frames = [
        frame
        for frame in frames
        if Path(frame.filename).is_absolute() and not any(Path(frame.filename).is_relative_to(at) for at in installed)
    ]
    return (user_frames or frames)[-1]


def _without_secrets(text: str, words: Sequence[str]) -> str:
    """Return a text with names in place of the secrets in the words of a command and in its recipes."""
    secrets = words_without_secrets(words)[1]
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("--config=") else word)
        with suppress(OSError, ValueError):  # a word that names no recipe
            secrets += secrets_of(read_recipe_file(path / CONFIG if path.is_dir() else path))
    return text_without_secrets(text, secrets)


if __name__ == "__main__":
    main()
