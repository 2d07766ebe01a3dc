"""Static analysis that finds the texts of hints in a package.

A hint is the argument `hint=` of a call. If the hint is a name or a call, the analysis finds the possible values.
"""

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HOLE = "\0"  # Placeholder for a value that is known only at run time.
MOST = 64  # maximum number of texts of one hint
# Texts that these functions return, with `HOLE` for values.
GENERAL = {"did_you_mean": f"Did you mean {HOLE}?", "explain": HOLE}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Site:
    """A call with a hint.

    Args:
        file: Path of the file in the package.
        function: Names of the class and the function around the call.
        line: Line of the hint.
        text: Text of the hint, with `HOLE` for values. Only `HOLE` if the analysis finds no constant text.
    """

    file: str
    function: str
    line: int
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Constant parts of the text, between the values."""
        return tuple(part for part in map(str.strip, self.text.split(HOLE)) if part)


class Module:
    """A parsed module: the names, functions, imports and calls that hints may refer to."""

    def __init__(self, source: str, name: str) -> None:
        self.tree = ast.parse(source)
        self.name = name
        self.values: dict[str, list[ast.expr]] = {}
        self.functions: dict[str, list[Function]] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        self.calls = list(calls(self.tree, ()))
        for name, value in assigned(self.tree.body):
            self.values.setdefault(name, []).append(value)


def assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that statements assign, with their values. Nested functions and classes are excluded."""
    for statement in body:
        for node in walk_scope(statement):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from paired(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
                yield from paired(node.target, node.value)


def paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        for index, part in enumerate(target.elts):
            if isinstance(value, ast.Tuple):
                yield from paired(part, value.elts[index])
            else:
                yield from paired(part, ast.Subscript(value, ast.Constant(index)))


def walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from walk_scope(child)


class Package:
    """The modules of a package, by their dotted names."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.files = {file: Module(source, dotted(file)) for file, source in sources.items()}
        self.modules = {module.name: module for module in self.files.values()}
        self.known: dict[tuple[object, ...], set[str]] = {}

    def sites(self) -> Iterator[Site]:
        """Yield one site for each possible text of each hint."""
        for file, module in self.files.items():
            for scope, call in module.calls:
                for keyword in call.keywords:
                    if keyword.arg == "hint" and not is_argument_of_check(call):
                        where = ".".join(part.name for part in scope) or "module"
                        for text in self.texts(keyword.value, module, scope, frozenset()):
                            yield Site(file, where, keyword.value.lineno, text.strip())

    def texts(self, value: ast.expr, module: Module, scope: tuple[ast.AST, ...], seen: frozenset[ast.AST]) -> set[str]:
        """Return the possible texts of an expression."""
        if value in seen:
            return {HOLE}
        seen |= {value}

        def again(other: ast.expr) -> set[str]:
            return self.texts(other, module, scope, seen)

        match value:
            case ast.Constant(value=str(text)):
                return {text}
            case ast.Constant(value=None):
                return {""}
            case ast.JoinedStr(values=parts):
                return joined([again(part) for part in parts])
            case ast.FormattedValue(value=ast.Constant() | ast.IfExp() as part):
                return again(part)
            case ast.FormattedValue(value=ast.Name(id=name)):
                return self.named(name, module, (), seen)  # Only constants of the module are resolved here.
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined([again(left), again(right)])
            case ast.IfExp(body=body, orelse=orelse):
                return again(body) | again(orelse)
            case ast.BoolOp(op=ast.Or(), values=parts):
                return set().union(*map(again, parts))
            case ast.BoolOp(values=parts):
                return again(parts[-1]) | {""}
            case ast.NamedExpr(value=part):
                return again(part)
            case ast.Subscript(value=ast.Dict(values=parts)):
                return set().union(*map(again, parts))
            case ast.Subscript(value=ast.Call(func=ast.Name(id=name)), slice=ast.Constant(value=int(index))):
                return self.returned(name, index, module, seen)
            case ast.Call(func=ast.Name(id=name)):
                return self.returned(name, None, module, seen)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return self.returned(name, None, module, seen)
            case ast.Name(id=name):
                return self.named(name, module, scope, seen)
        return {HOLE}

    def named(self, name: str, module: Module, scope: tuple[ast.AST, ...], seen: frozenset[ast.AST]) -> set[str]:
        """Return the possible texts of a name.

        The name may be a local variable, an argument that callers pass, a module constant, or an imported constant.
        """
        for depth in range(len(scope), 0, -1):
            function = scope[depth - 1]
            if not isinstance(function, Function):
                continue
            values = [value for one, value in assigned(function.body) if one == name]
            if values:
                return set().union(*(self.texts(value, module, scope[:depth], seen) for value in values))
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if name in [one.arg for one in arguments]:
                return self.passed(name, function, seen)
        if name in module.values:
            return set().union(*(self.texts(value, module, (), seen) for value in module.values[name]))
        found = self.imported(name, module)
        if found and found[1] in found[0].values:
            return self.named(found[1], found[0], (), seen)
        return {HOLE}

    def passed(self, name: str, function: Function, seen: frozenset[ast.AST]) -> set[str]:
        """Return the possible texts that callers pass as an argument of a function."""
        if function in seen or function.name.startswith("__"):
            return {HOLE}
        positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args) if one.arg != "self"]
        if (function, name) in self.known:
            return self.known[function, name]
        found = self.known[function, name] = set()  # ends the recursion if a function calls itself
        for module in self.files.values():
            for scope, call in module.calls:
                called = call.func
                if function.name != (called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)):
                    continue
                for keyword in call.keywords:
                    if keyword.arg == name:
                        found |= self.texts(keyword.value, module, scope, seen | {function})
                if name in positional and positional.index(name) < len(call.args):
                    found |= self.texts(call.args[positional.index(name)], module, scope, seen | {function})
        found |= {HOLE} if not found else set()
        return found

    def returned(self, name: str, index: int | None, module: Module, seen: frozenset[ast.AST]) -> set[str]:
        """Return the possible texts that a function of the package returns, alone or as item ``index`` of a tuple."""
        if name in GENERAL:
            return {GENERAL[name]}
        found = self.imported(name, module)
        if found:
            name, module = found[1], found[0]
        if (module, name, index) in self.known:
            return self.known[module, name, index]
        texts = self.known[module, name, index] = set()
        for function in module.functions.get(name, []):
            for statement in function.body:
                for node in walk_scope(statement):
                    if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                        value = node.value
                        if index is not None and isinstance(value, ast.Tuple):
                            value = value.elts[index]
                        texts |= self.texts(value, module, (function,), seen)
        texts |= {HOLE} if not texts else set()
        return texts

    def imported(self, name: str, module: Module) -> tuple[Module, str] | None:
        """Return the package module from which a name is imported, and the name in that module.

        Return None if the name is not imported from the package.
        """
        source, original = module.imports.get(name, ("", ""))
        return (self.modules[source], original) if source in self.modules else None


def is_argument_of_check(call: ast.Call) -> bool:
    """Return whether `hint` is a type annotation, as in calls of `check_argument` and `explain`, and not a text."""
    return isinstance(call.func, ast.Name) and call.func.id in ("check_argument", "explain")


def calls(node: ast.AST, scope: tuple[ast.AST, ...]) -> Iterator[tuple[tuple[ast.AST, ...], ast.Call]]:
    """Yield the calls in a tree, each with its enclosing classes and functions."""
    if isinstance(node, ast.Call):
        yield scope, node
    within = (*scope, node) if isinstance(node, Function | ast.ClassDef) else scope
    for child in ast.iter_child_nodes(node):
        yield from calls(child, within)


def joined(parts: list[set[str]]) -> set[str]:
    """Return at most `MOST` texts. Each text joins one alternative of each part."""
    return set(itertools.islice(map("".join, itertools.product(*map(sorted, parts))), MOST))


def dotted(file: str) -> str:
    return "lightning_fcl." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_package(folder: Path) -> Package:
    """Return the parsed package in a folder."""
    files = sorted(folder.rglob("*.py"))
    return Package({file.relative_to(folder).as_posix(): file.read_text() for file in files})
