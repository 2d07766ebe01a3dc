"""Lists of public names with the first lines of their docstrings. The source is read without importing the modules."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_fcl
from lightning_fcl.io.reading import read_text


def public_summaries(package: str, base: str = "") -> dict[str, str]:
    """Return the first docstring line of each public class and function of a package or module, by name.

    Args:
        package: Full name of the package or module, such as ``"lightning_fcl.methods"``.
        base: Name of a class. Only subclasses of this class are listed. By default, all names are listed.

    Example:
        >>> public_summaries("lightning_fcl.methods", "Method")["FedProx"].startswith("FedProx (Li et al., 2020)")
        True
    """
    source = _source_file(package)
    modules = _modules_of_names(package)
    public = {*modules} or {node.name for node in _definitions(source)}
    siblings = source.parent.glob("*.py") if source.stem == "__init__" else [source]
    files = {*map(_source_file, modules.values()), *siblings}
    nodes = {node.name: node for file in sorted(files) for node in _definitions(file)}

    def is_subclass(name: str) -> bool:
        node = nodes.get(name)
        bases = [one.id for one in node.bases if isinstance(one, ast.Name)] if isinstance(node, ast.ClassDef) else []
        return base in bases or any(is_subclass(one) for one in bases)

    return {
        name: (ast.get_docstring(nodes[name]) or "").partition("\n")[0]
        for name in sorted(public)
        if name in nodes and not name.startswith("_") and (not base or is_subclass(name))
    }


def _modules_of_names(package: str) -> dict[str, str]:
    """Return the module of each public name of a package, by name.

    The names are read from the stub, or from the source if there is no stub.
    """
    source = _source_file(package)
    stub = source.with_suffix(".pyi")
    modules: dict[str, str] = {}
    for node in _parse(stub if stub.exists() else source).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            module = f"{package}.{node.module}" if node.level else node.module
            if node.names[0].name == "*":
                modules |= _modules_of_names(module)
            modules |= {alias.name: module for alias in node.names if alias.asname == alias.name}
    return modules


def _source_file(module: str) -> Path:
    path = Path(lightning_fcl.__file__).parent.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _definitions(file: Path) -> list[ast.ClassDef | ast.FunctionDef]:
    return [node for node in _parse(file).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def _parse(file: Path) -> ast.Module:
    return ast.parse(read_text(file))
