"""The command `lightning-fcl`: runs subcommands, and prints errors without a traceback."""

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
    """A subcommand.

    In the help, the first paragraph of a subclass's docstring is the description. The rest is the epilog.

    Attributes:
        takes_settings: Whether the command accepts settings of a recipe, such as ``--data.batch_size 16``.
        forwards_arguments: Values of the first argument for which all other arguments are passed to another program.
    """

    takes_settings: ClassVar[bool] = False
    forwards_arguments: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command to a parser."""

    @abstractmethod
    def run(self, options: argparse.Namespace) -> None:
        """Run the command.

        Args:
            options: Parsed arguments. ``options.words`` contains the words after the name of the command.
                ``options.layers`` contains the files and settings of a recipe that these words specify.
        """


# Class and help text of each subcommand. The module of a class is imported only when the subcommand is used.
COMMANDS = {
    "ls": ("list_command.Ls", "list recipes, methods, models, datasets and other items"),
    "new": ("new.New", "write the skeleton of a method, with a recipe and a test"),
    "cp": ("fit.Cp", "copy a recipe to one YAML file, to change it"),
    "validate": ("fit.Validate", "check a recipe, its data and its shapes without training"),
    "fit": ("fit.Fit", "train a recipe"),
    "test": ("fit.Test", "test the model of a run"),
    "report": ("report.Report", "write an HTML report of one or several runs"),
    "appendix": ("appendix.Appendix", "print a description of runs for a paper, with BibTeX"),
    "reproduce": ("reproduce.Reproduce", "train the recipes of a paper, and write its table"),
    "leaderboard": (
        "leaderboard.Leaderboard",
        "compare methods under the same protocols",
    ),
    "tune": ("tune.Tune", "search for the hyperparameters of a recipe"),
    "edge-report": ("edge.DeviceReport", "estimate memory, time and energy on a microcontroller"),
    "export": ("edge.Export", "export the model of a run to ONNX or ExecuTorch"),
    "deploy": (
        "deploy.Deploy",
        "deploy a recipe on real machines with Flower",
    ),
    "conformance": ("conformance.Conformance", "check a method against the statements of its paper"),
    "zoo": ("zoo.Zoo", "list, verify, use and publish pretrained networks"),
    "demo": ("demo.Demo", "train the quickstart, and compare it with fine-tuning"),
    "data": (
        "data.Data",
        "list, verify, download and plot datasets",
    ),
    "completion": ("completion.Completion", "print a completion script for bash or zsh"),
}
_FORESEEN = (LightningFCLError, ValueError, OSError, ModuleNotFoundError)
EPILOG = """
examples:
  lightning-fcl fit quickstart
  lightning-fcl test runs/quickstart
  lightning-fcl report RUN RUN
  lightning-fcl appendix RUN --out appendix.tex
  lightning-fcl cp flwf/flwf-2t-ft my.yaml
  lightning-fcl new method FedAnchor
  lightning-fcl reproduce flwf --seeds 5
  lightning-fcl leaderboard --protocols P4
  lightning-fcl tune SEARCH.yaml --trials 50
  lightning-fcl export runs/fit
  lightning-fcl deploy flower quickstart --out app
  lightning-fcl data show quickstart
  eval "$(lightning-fcl completion bash)"

`lightning-fcl COMMAND --help` shows the options of a command.
Datasets are stored in $LIGHTNING_FCL_DATA (default: ~/.cache/lightning-fcl/data).
A `class_path` can name a class in a file of the working directory, as in my_model.MyNet.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line. If the command fails or is stopped, exit with a status other than 0."""
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
    parser.add_argument("command", metavar="COMMAND", help="select a command from the list below")
    if not words:
        parser.print_help()
        return
    command = parser.parse_args(words[:1]).command
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        parser.error(f"Expected COMMAND to be one of {', '.join(COMMANDS)}, but got {command}.{hint}")
    if sys.flags.optimize > 1:
        message = "Expected Python with docstrings, which charts and options need, but got Python without docstrings."
        parser.exit(2, f"lightning-fcl: error: {message} Unset PYTHONOPTIMIZE, and run Python without -OO.\n")
    # Recipes can name classes of modules in the working directory, as under `python -m`. Workers inherit `sys.path`.
    # The working directory comes last, so that its files do not shadow installed modules.
    # The folder of the recipe is not added, so that `config.yaml` of a run imports the same modules as the recipe.
    try:
        working_folder = str(Path.cwd())
    except FileNotFoundError:
        parser.exit(
            2, "lightning-fcl: error: Expected a working directory, but it was deleted. Change to another folder.\n"
        )
    if working_folder not in sys.path:
        sys.path.append(working_folder)
    command_parser = argparse.ArgumentParser(
        f"lightning-fcl {command}", formatter_class=raw, conflict_handler="resolve", allow_abbrev=False
    )
    with stop.installed():
        try:
            with private_temporary_folder(), ExitStack() as exit_stack:
                # Only rank 0 prints. PyTorch and Slurm set these variables to the rank.
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
                    read_recipe_file(file)  # Report an unreadable recipe before anything is printed or imported.
                if selected_command.takes_settings:
                    _set_matplotlib_folder()
                options = command_parser.parse_args(rest, argparse.Namespace(words=words[1:], layers=layers))
                selected_command.run(options)
            _flush()
        except Stopped as stopped:
            parser.exit(128 + stopped.number, f"lightning-fcl: {stopped.message}\n")
        except BrokenPipeError:  # The reader of the output, such as `head`, has ended.
            _drop_output()
            parser.exit(128 + signal.SIGPIPE)
        except Exception as error:
            foreseen = isinstance(error, _FORESEEN)
            if stop.signal and not foreseen:
                # The error may be a consequence of the signal, because other processes received it, too.
                exit_now(stop.signal, "stopped after a signal. Resume from the newest checkpoint, if there is one.")
            if os.environ.get("LIGHTNING_FCL_TRACEBACK"):
                raise
            if isinstance(error, MemoryError) or match_error(error, LibraryError.NO_MEMORY):
                need = "Expected more memory, but no memory is left. Raise the memory limit (ulimit -v) if there is one"
                parser.exit(2, f"lightning-fcl: error: {need}, or reduce `--workers` or `batch_size`.\n")
            if not foreseen:
                parser.exit(1, _write_traceback(error, words))
            traceback_hint = "(Set LIGHTNING_FCL_TRACEBACK=1 to see the traceback.)"
            parser.exit(2, _without_secrets(f"lightning-fcl: error: {error}\n{traceback_hint}\n", words))


def _open_standard_streams() -> None:
    """Open the null device for each closed standard stream, so that no other file gets the stream's descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _set_matplotlib_folder() -> None:
    """Set the configuration folder of Matplotlib to a cache folder, unless the user has configured Matplotlib."""
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
    """Redirect the remaining output to the null device. Otherwise, writing this output fails when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    """Write buffered output.

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
            f"Expected to write to standard output, but got: {error}.", hint="Redirect the output to another file."
        ) from error


def load_command(path: str) -> Command:
    """Return the command with a class path relative to `lightning_fcl.cli`, such as ``list_command.Ls``."""
    module, _, name = path.partition(".")
    command: Command = getattr(import_module(f"lightning_fcl.cli.{module}"), name)()
    return command


def _write_traceback(error: Exception, words: Sequence[str]) -> str:
    """Write the traceback of an unexpected error to a file, and return the message about the error."""
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
        f"It was raised in {origin.filename}, line {origin.lineno}. Its traceback is in {file.name}. If this code is "
        "yours, correct it. Otherwise please report it as an issue of lightning-fcl, with the traceback.\n"
    )


def _origin(error: Exception) -> traceback.FrameSummary:
    """Return the last frame of an error's traceback that is in a file of the user.

    If there is no such frame, return the last frame.
    """
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
    """Return a text with names of environment variables in place of secrets.

    The secrets are those in a command line, and in the recipe files and run folders that the command line names.
    """
    secrets = words_without_secrets(words)[1]
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("--config=") else word)
        with suppress(OSError, ValueError):  # The word does not name a recipe.
            secrets += secrets_of(read_recipe_file(path / CONFIG if path.is_dir() else path))
    return text_without_secrets(text, secrets)


if __name__ == "__main__":
    main()
