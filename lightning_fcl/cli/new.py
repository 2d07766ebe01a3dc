"""`lightning-fcl new`: skeletons of custom code, which work as written."""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import re
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from string import Template

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import FileConflictError, InvalidValueError, MissingFileError
from lightning_fcl.io.atomic import disk_error_context
from lightning_fcl.io.reading import read_text

_TEMPLATES = Path(__file__).parent / "templates" / "method"
_CAMEL_CASE = re.compile(r"[A-Z][A-Za-z0-9]*")
_SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# An uppercase letter starts a word if it follows a lowercase letter or digit, or precedes a lowercase letter.
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Names that the templates import. A class with such a name would replace the imported name.
_IMPORTED = {"Any", "Tensor", "Statement"}
_MAX_LENGTH = 45


class New(Command):
    """Write a skeleton of custom code: a module, a recipe and a test that work as written."""

    def arguments(self, parser: ArgumentParser) -> None:
        kinds = parser.add_subparsers(required=True, metavar="method")
        method = kinds.add_parser(
            "method",
            help="write a method, with a recipe and its conformance test",
            description="Write a method as a Python module, with a recipe on bundled data and a conformance test.",
            epilog="example:\n  lightning-fcl new method FedAnchor\n  pytest test_fed_anchor.py\n"
            "  lightning-fcl fit fed_anchor.yaml",
            formatter_class=RawDescriptionHelpFormatter,
        )
        method.add_argument("name", metavar="NAME", help="name the class, such as FedAnchor or fed_anchor")
        method.add_argument(
            "--out", type=Path, default=Path(), metavar="FOLDER", help="write to this folder (default: the current one)"
        )

    def run(self, options: Namespace) -> None:
        class_name, module_name = derive_names(options.name)
        folder: Path = options.out
        _check_folder(folder)
        _check_module_name(options.name, class_name, module_name, folder)
        contents = {
            folder / name.replace("name", module_name): Template(read_text(_TEMPLATES / template)).substitute(
                class_name=class_name, module_name=module_name
            )
            for name, template in {
                "name.py": "method.py.template",
                "name.yaml": "recipe.yaml.template",
                "test_name.py": "test_method.py.template",
            }.items()
        }
        write_new_files(contents)
        print("\n".join(["Wrote", *(f"  {path}" for path in contents)]))
        steps = [["pytest", f"test_{module_name}.py"], ["lightning-fcl", "fit", f"{module_name}.yaml"]]
        if folder.resolve() != Path.cwd():
            steps.insert(0, ["cd", str(folder)])
        print("\n".join(["Test and train the method:", *(f"  {shlex.join(words)}" for words in steps)]))


def derive_names(name: str) -> tuple[str, str]:
    """Return the class name and the module name for a name in CamelCase or snake_case.

    Raises:
        InvalidValueError: If the name is in another form, or if Python, pytest or the library uses the name.

    Example:
        >>> derive_names("FedAnchorPlus"), derive_names("fed_anchor")
        (('FedAnchorPlus', 'fed_anchor_plus'), ('FedAnchor', 'fed_anchor'))
    """
    names = _split_name(name)
    if names is None:
        words = re.findall(r"[A-Za-z0-9]+", _WORD_START.sub("_", name))
        camel_name = "".join(word[:1].upper() + word[1:] for word in words).lstrip("0123456789")[:_MAX_LENGTH]
        raise InvalidValueError(
            f"Expected NAME in CamelCase or snake_case, with letters from A to Z and digits and at most {_MAX_LENGTH} "
            f"characters, but got {name!r}.",
            hint=f"Use a name such as {_suggest(camel_name, f'My{camel_name}', f'My{camel_name}Method')}.",
            argument="name",
            value=name,
        )
    if problem := _find_problem(*names):
        raise _unusable(name, problem, names[0])
    return names


def write_new_files(contents: Mapping[Path, str]) -> None:
    """Write new files. If a file exists or cannot be written, no file is left.

    Raises:
        FileConflictError: If a file exists.
        FileAccessError: If a file cannot be written.
    """
    written_paths: list[Path] = []
    try:
        for path, content in contents.items():
            with disk_error_context(path, len(content.encode()), "run the command again"):
                try:
                    # The mode "x" fails if the file exists, also if another process has just created it.
                    with open(path, "x", encoding="utf-8") as file:
                        written_paths.append(path)
                        file.write(content)
                except FileExistsError as error:
                    raise FileConflictError(
                        f"Expected a new file, but {path} exists. Nothing was written.",
                        hint="Use another NAME, or another `--out`.",
                        argument="name",
                        value=path,
                    ) from error
    except BaseException:
        for path in written_paths:
            path.unlink(missing_ok=True)
        raise


def _split_name(name: str) -> tuple[str, str] | None:
    """Return the class name and the module name, or None if the name is neither in CamelCase nor in snake_case."""
    if len(name) > _MAX_LENGTH:
        return None
    if _CAMEL_CASE.fullmatch(name):
        return name, _WORD_START.sub("_", name).lower()
    if _SNAKE_CASE.fullmatch(name):
        return "".join(word.capitalize() for word in name.split("_")), name
    return None


def _find_problem(class_name: str, module_name: str) -> str:
    """Return why a new method cannot have the names, or "" if it can."""
    from lightning_fcl import callbacks, methods

    if keyword.iskeyword(module_name) or keyword.iskeyword(class_name):
        return f"`{module_name}` is a keyword of Python"
    if class_name in _IMPORTED or hasattr(builtins, class_name):
        return f"Python code needs another class `{class_name}`"
    if module_name == "conftest" or re.fullmatch(r"test(_.*)?|.*_test", module_name):
        return f"pytest reads {module_name}.py as a file of tests"
    for public in sorted({*dir(methods), *dir(callbacks)}):
        if public.lower() in (class_name.lower(), module_name):
            return f"the library has `{public}`"
    return ""


def _suggest(*suggestions: str) -> str:
    """Return the first suggestion that is usable as a NAME, otherwise an example."""
    for suggestion in suggestions:
        names = _split_name(suggestion)
        if names is not None and not _find_problem(*names) and importlib.util.find_spec(names[1]) is None:
            return suggestion
    return "FedAnchor"


def _unusable(name: str, problem: str, class_name: str) -> InvalidValueError:
    return InvalidValueError(
        f"Expected the NAME of a new method, but got {name}: {problem}.",
        hint=f"Use a name such as {_suggest(f'My{class_name}', f'My{class_name}Method')}.",
        argument="name",
        value=name,
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        exists = folder.exists()
        create_hint = f"Create the folder with `mkdir -p {shlex.quote(str(folder))}`, or use another folder."
        raise MissingFileError(
            f"Expected `--out` to be an existing folder, but {folder} {'is a file' if exists else 'does not exist'}.",
            hint="Use another folder for `--out`." if exists else create_hint,
            argument="out",
            value=folder,
        )


def _check_module_name(name: str, class_name: str, module_name: str, folder: Path) -> None:
    """Raise InvalidValueError if an import of the new module would find an installed module or a package."""
    if (folder / module_name / "__init__.py").exists():
        raise _unusable(name, f"{folder / module_name} is a package of the same name", class_name)
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # a loaded module without a specification
        spec = None
    # A folder without a file `__init__.py` has no origin. A module of the same name precedes such a folder.
    if spec is None or spec.origin is None:
        return
    origin = Path(spec.origin)
    home = origin.parent.parent if origin.name == "__init__.py" else origin.parent
    # `write_new_files` checks for a file in the new module's folder. The module of another working directory is no
    # conflict.
    if origin.is_absolute() and home.resolve() in (folder.resolve(), Path.cwd()):
        return
    raise _unusable(name, f"Python has an installed module `{module_name}`", class_name)
