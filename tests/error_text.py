"""Static analysis that finds decisions by the text of an error.

The analysis tracks errors and their texts through all given files. It reports each place that compares, searches or
splits such a text, or uses the text as a key.

These values count as errors:
- names of `except ... as name`, names after `isinstance(name, SomeError)`, and calls of exception classes,
- parameters and variables whose annotation contains an exception class, and `self` in methods of exception classes,
- `sys.exc_info()`, `sys.exception()`, and `__cause__`, `__context__` and `exceptions` of an error.

A class is an exception class if its name ends in `Error` or `Exception`, or if one of its base classes in the given
files is an exception class.

These values count as texts: `str`, `repr`, `format`, f-strings and `%` of an error, its `args`, `__notes__`, `hint` and
similar attributes, and `traceback.format_*`. The analysis tracks texts through assignments, unpacking, containers,
comprehensions, closures, attributes of `self`, string methods, and calls of unknown functions. Calls of functions,
methods and lambdas of the given files are analyzed with the labels (error or text) of the arguments, at any depth. If
the class of an object is unknown, all methods with the called name are analyzed.

The analysis does not find:
- decisions by the length of a text, by its truth value, by methods such as `isdigit`, or by `sorted`, `min` and `max`,
- texts that pass through files, queues or processes,
- texts in attributes of objects other than `self` that another function reads,
- texts in names that are computed at run time (`getattr(error, name)`, `globals()[name]`),
- texts in attributes of errors that `TEXT_ATTRIBUTES` does not list, and in records of `warnings`,
- texts in objects of classes of the given files, after a function returns the object or passes it to another function,
- methods that a list, dict, set, string or file also has, such as `add` and `write`, if the object's class is unknown,
- assignments to a name in the branch of `isinstance(name, SomeError)` that are read after the branch,
- callbacks that are stored in an attribute or a container and called elsewhere.

The analysis ignores the order of statements: a name that is a text in one part of a function is a text in the whole
function.

`lightning_fcl/library_errors.py` may compare texts, because its table contains all patterns. The result of its
`match_error` does not count as a text, so code may compare its groups.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

TABLE = "lightning_fcl/library_errors.py"
MATCHES = "match_error"

# Labels of a value, as a set of bits.
# HOLDER marks an object that was constructed with a text. The attributes of the object are texts, but only in the
# function that constructs the object.
ERROR, TEXT, HOLDER = 1, 2, 4

TEXT_ATTRIBUTES = frozenset(
    {"args", "__notes__", "hint", "message", "msg", "problem", "reason", "strerror", "stderr", "stdout", "output"}
)
ERROR_ATTRIBUTES = frozenset({"__cause__", "__context__", "exceptions", "error", "exception"})
TO_TEXT = frozenset({"str", "repr", "format", "ascii"})
TEXT_METHODS = frozenset({"format", "join", "__str__", "__repr__", "__format__"})
NO_TEXT = frozenset({"bool", "callable", "hasattr", "id", "isinstance", "issubclass", "len", "print", "range", "type"})
LOGS = frozenset({"critical", "debug", "error", "exception", "info", "log", "warn", "warning"})
STRING_METHODS = (
    *("startswith", "endswith", "split", "rsplit", "partition", "rpartition", "splitlines", "find", "rfind", "index"),
    *("rindex", "count", "removeprefix", "removesuffix", "replace", "__contains__", "__eq__", "__ne__"),
)
PATTERN_METHODS = ("search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn")
SET_METHODS = ("isdisjoint", "issubset", "issuperset", "intersection", "difference")
COMPARING = frozenset((*STRING_METHODS, *PATTERN_METHODS, *SET_METHODS))
COMPARING_CALLS = frozenset({"get_close_matches", "SequenceMatcher", "fnmatch", "fnmatchcase", "contains", "eq", "ne"})
LOOKUPS = frozenset({"get", "pop"})
BUILT_IN = frozenset(name for kind in (str, bytes, list, dict, set, io.TextIOWrapper, type) for name in dir(kind))
CHANGES = frozenset({"add", "append", "appendleft", "extend", "insert", "setdefault", "update"})


@dataclass(frozen=True, order=True)
class Finding:
    """A decision by the text of an error."""

    path: str
    line: int
    what: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}{f' (called from {self.origin})' if self.origin else ''}"


@dataclass(eq=False)
class Class:
    """A class and its methods."""

    node: ast.ClassDef
    methods: dict[str, Scope] = field(default_factory=dict)


@dataclass(eq=False)
class Scope:
    """A module, function or lambda, with the functions and classes that it defines."""

    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    path: str
    outer: Scope | None = None
    owner: Class | None = None
    names: set[str] = field(default_factory=set)
    outer_names: set[str] = field(default_factory=set)
    functions: dict[str, Scope] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[ast.arg]:
        if isinstance(self.node, ast.Module):
            return []
        return [*self.node.args.posonlyargs, *self.node.args.args]

    @property
    def other_parameters(self) -> list[ast.arg]:
        if isinstance(self.node, ast.Module):
            return []
        return [*self.node.args.kwonlyargs, *filter(None, (self.node.args.vararg, self.node.args.kwarg))]

    @property
    def is_static(self) -> bool:
        decorators = getattr(self.node, "decorator_list", [])
        return any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in decorators)


@dataclass(frozen=True)
class Context:
    """A scope, with labels of its arguments (error or text) and the context of the enclosing scope."""

    scope: Scope
    arguments: frozenset[tuple[str, int]] = frozenset()
    outer: Context | None = None


def find_decisions(sources: Mapping[str, str]) -> list[Finding]:
    """Return all decisions by the text of an error. ``sources`` maps paths to source texts."""
    analysis = Analysis(sources)
    analysis.run()
    return sorted(analysis.findings.values())


class Analysis:
    """A fixed-point analysis over the contexts of all functions.

    A cell stores the labels of a name, an attribute or a result. Labels are only added to cells. Contexts that read a
    changed cell are evaluated again.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.findings: dict[tuple[str, int, str], Finding] = {}
        self.origins: dict[Context, str] = {}
        self.modules: dict[str, Scope] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.methods: dict[str, list[Scope]] = {}
        self.functions: dict[str, list[Scope]] = {}
        self.classes: dict[str, list[Class]] = {}
        self._cells: dict[object, int] = {}
        self._readers: dict[object, dict[Context, None]] = {}
        self._waiting: dict[Context, None] = {}
        for path, source in sources.items():
            scope = Scope(ast.parse(source, path), path)
            self.modules[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = scope
            self._index(scope, scope.node, None)
        self.roots = {name.partition(".")[0] for name in self.modules}
        self._is_exception: dict[str, bool] = {}

    def run(self) -> None:
        for scope in self.modules.values():
            self.schedule(Context(scope))
        while self._waiting:
            context, _ = self._waiting.popitem()
            Evaluation(self, context).run()

    def schedule(self, context: Context, origin: str = "") -> None:
        if context not in self.origins:
            self.origins[context] = origin
            self._waiting[context] = None

    def read(self, cell: object, reader: Context) -> int:
        self._readers.setdefault(cell, {})[reader] = None
        return self._cells.get(cell, 0)

    def write(self, cell: object, labels: int) -> None:
        if labels & ~self._cells.get(cell, 0):
            self._cells[cell] = self._cells.get(cell, 0) | labels
            self._waiting.update(dict.fromkeys(self._readers.get(cell, ())))

    def is_exception(self, name: str) -> bool:
        """Return whether a class of this name is an exception class. Built-in warnings do not count."""
        if name not in self._is_exception:
            self._is_exception[name] = False  # ends the recursion if a base class has the same name
            known = self.classes.get(name)
            if known:
                bases = [_last_name(base) for one in known for base in one.node.bases]
                self._is_exception[name] = any(self.is_exception(base) for base in bases)
            else:
                kind = getattr(builtins, name, None)
                is_builtin = isinstance(kind, type) and issubclass(kind, BaseException)
                is_warning = isinstance(kind, type) and issubclass(kind, Warning)
                self._is_exception[name] = name.endswith(("Error", "Exception")) or (is_builtin and not is_warning)
        return self._is_exception[name]

    def annotated(self, annotation: ast.expr | None) -> int:
        """Return ERROR if an annotation, or a part of a union or container, is an exception class, otherwise 0."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self.annotated(ast.parse(text, mode="eval").body)
            case ast.Name() | ast.Attribute():
                return ERROR if self.is_exception(_last_name(annotation)) else 0
            case ast.BinOp(left=left, right=right):
                return self.annotated(left) | self.annotated(right)
            case ast.Subscript(value=value, slice=inner) if _last_name(value) not in ("type", "Type", "Callable"):
                return self.annotated(inner)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return max(map(self.annotated, parts), default=0)
        return 0

    def _index(self, scope: Scope, node: ast.AST, owner: Class | None) -> None:
        """Collect the names, functions, classes and imports of a scope."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = self.scopes[child] = Scope(child, scope.path, scope, owner)
                inner.names |= {one.arg for one in (*inner.parameters, *inner.other_parameters)}
                if isinstance(child, ast.Lambda):
                    self._index(inner, child, None)
                    continue
                if owner is not None:
                    owner.methods[child.name] = inner
                    self.methods.setdefault(child.name, []).append(inner)
                else:
                    scope.functions[child.name] = inner
                    if scope.outer is None:
                        self.functions.setdefault(child.name, []).append(inner)
                self._index(inner, child, None)
            elif isinstance(child, ast.ClassDef):
                made = scope.classes[child.name] = Class(child)
                self.classes.setdefault(child.name, []).append(made)
                self._index(scope, child, made)
            else:
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                    scope.names.add(child.id)
                elif isinstance(child, ast.Global | ast.Nonlocal):
                    scope.outer_names |= {*child.names}
                elif isinstance(child, ast.Import):
                    for one in child.names:
                        scope.imports[one.asname or one.name.partition(".")[0]] = (one.name, "")
                elif isinstance(child, ast.ImportFrom):
                    for one in child.names:
                        scope.imports[one.asname or one.name] = (child.module or "", one.name)
                elif isinstance(child, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and child.name:
                    scope.names.add(child.name)
                self._index(scope, child, owner)
                if isinstance(child, ast.Assign) and isinstance(child.value, ast.Lambda):
                    for target in child.targets:
                        if isinstance(target, ast.Name):
                            scope.functions[target.id] = self.scopes[child.value]


def _union(labels: Iterable[int]) -> int:
    return functools.reduce(operator.or_, labels, 0)


def _has_star(node: ast.Tuple | ast.List) -> bool:
    return any(isinstance(part, ast.Starred) for part in node.elts)


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _dotted(node: ast.AST) -> str:
    """Return a name with attributes, such as `self.a.b`, or "" for another expression."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class Arguments:
    """The labels of the arguments of a call."""

    positional: list[int] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)
    spread: int = 0  # labels of `*args` and `**kwargs`

    @property
    def all(self) -> int:
        return _union((self.spread, *self.positional, *self.named.values()))


class Evaluation:
    """One evaluation of the statements of a context."""

    def __init__(self, analysis: Analysis, context: Context) -> None:
        self.analysis, self.context, self.scope = analysis, context, context.scope
        # Inner scopes of comprehensions, `except` clauses and `isinstance` tests.
        self._inner: list[dict[str, object]] = []
        self._applied: dict[ast.AST, list[Context]] = {}  # the contexts that each call expression has called

    def run(self) -> None:
        node, given = self.scope.node, dict(self.context.arguments)
        for place, one in enumerate((*self.scope.parameters, *self.scope.other_parameters)):
            labels = given.get(one.arg, 0) | self.analysis.annotated(one.annotation)
            if place == 0 and self.scope.owner and self.analysis.is_exception(self.scope.owner.node.name):
                labels |= 0 if self.scope.is_static else ERROR
            self.write(one.arg, labels)
        if isinstance(node, ast.Lambda):
            self.give(node.body)
        else:
            for statement in node.body:
                self.visit(statement)

    # Cells

    def cell(self, name: str) -> object:
        """Return the key of the cell that stores the labels of a name, in this or an enclosing context."""
        for names in reversed(self._inner):
            if name in names:
                return names[name]
        context: Context | None = self.context
        while context is not None:
            scope = context.scope
            if (name in scope.names and name not in scope.outer_names) or context.outer is None:
                return context, name
            context = context.outer
        return self.context, name

    def attribute_cell(self, node: ast.Attribute) -> object | None:
        path = _dotted(node)
        owner = self.owner()
        if owner is not None and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            return owner, node.attr
        return (self.context, path) if path else None

    def owner(self) -> Class | None:
        """Return the class of the method that contains this scope, or None."""
        scope: Scope | None = self.scope
        while scope is not None and scope.owner is None:
            scope = scope.outer
        return scope.owner if scope is not None else None

    def read(self, name: str) -> int:
        cell = self.cell(name)
        labels = self.analysis.read(cell, self.context)
        # A closure also reads names that inner scopes of the outer function bind.
        if isinstance(cell, tuple) and cell[0] is not self.context:
            labels |= self.analysis.read((*cell, "inner"), self.context)
        return labels

    def write(self, name: str, labels: int) -> None:
        cell = self.cell(name)
        self.analysis.write(cell, labels)
        if any(name in names for names in self._inner):
            self.analysis.write((self.context, name, "inner"), labels)

    def give(self, node: ast.expr | None) -> None:
        """Add the labels of a returned expression to the result. Parts of a returned tuple have separate labels."""
        parts = node.elts if isinstance(node, ast.Tuple) and not _has_star(node) else [node]
        for place, part in enumerate(parts):
            labels = self.value(part) & ~HOLDER
            self.analysis.write((self.context, "return"), labels)
            self.analysis.write((self.context, "return", place if len(parts) > 1 else None), labels)

    def bind(self, target: ast.AST, labels: int) -> None:
        """Add labels to the cells of an assignment target."""
        match target:
            case ast.Name(id=name):
                self.write(name, labels)
            case ast.Attribute():
                if cell := self.attribute_cell(target):
                    self.analysis.write(cell, labels)
            case ast.Subscript(value=value):
                self.value(target.slice)
                self.bind(value, labels)
            case ast.Starred(value=value):
                self.bind(value, labels)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.bind(part, labels)

    def assign(self, target: ast.AST, value: ast.expr) -> None:
        labels, is_plain = self.value(value), isinstance(target, ast.Tuple | ast.List) and not _has_star(target)
        if is_plain and isinstance(value, ast.Tuple | ast.List) and not _has_star(value):
            for one, part in zip(target.elts, value.elts, strict=False):
                self.assign(one, part)
        elif is_plain and self._applied.get(value):
            for place, one in enumerate(target.elts):
                cells = [(context, "return", at) for context in self._applied[value] for at in (place, None)]
                self.bind(one, _union(self.analysis.read(cell, self.context) for cell in cells))
        else:
            self.bind(target, labels)

    def report(self, node: ast.AST, what: str) -> None:
        if self.scope.path != TABLE:
            line = getattr(node, "lineno", 0)
            finding = Finding(self.scope.path, line, what, self.analysis.origins[self.context])
            self.analysis.findings.setdefault((finding.path, line, what), finding)

    # Statements

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.expr():
                self.value(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.value(part)
                self.analysis.schedule(Context(self.analysis.scopes[node], outer=self.context))
            case ast.Return(value=value):
                self.give(value)
            case ast.Assign():
                for target in node.targets:
                    self.assign(target, node.value)
            case ast.AnnAssign():
                labels = self.analysis.annotated(node.annotation)
                self.bind(node.target, labels | (self.value(node.value) if node.value is not None else 0))
            case ast.AugAssign():
                self.bind(node.target, self.value(node.value))
            case ast.For() | ast.AsyncFor():
                self.bind(node.target, self.value(node.iter))
                for part in (*node.body, *node.orelse):
                    self.visit(part)
            case ast.withitem():
                labels = self.value(node.context_expr)
                if node.optional_vars is not None:
                    self.bind(node.optional_vars, labels)
            case ast.ExceptHandler():
                self._inner.append({node.name: (self.context, node)} if node.name else {})
                if node.name:
                    self.write(node.name, ERROR)
                for part in node.body:
                    self.visit(part)
                self._inner.pop()
            case ast.If(test=test):
                self.value(test)
                names = self.narrowed(test)
                if isinstance(test, ast.UnaryOp) and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue):
                    for name in self.narrowed(test.operand):
                        self.write(name, ERROR)
                self.push_errors(node, names)
                for part in node.body:
                    self.visit(part)
                self._inner.pop()
                for part in node.orelse:
                    self.visit(part)
            case ast.Assert(test=test):
                self.union(test, *filter(None, [node.msg]))
                for name in self.narrowed(test):
                    self.write(name, ERROR)
            case ast.Match():
                subject = self.value(node.subject)
                for case in node.cases:
                    self.pattern(case.pattern, subject)
                    for part in filter(None, (case.guard, *case.body)):
                        self.visit(part)
            case _:
                for child in ast.iter_child_nodes(node):
                    self.visit(child)

    def pattern(self, node: ast.pattern, labels: int) -> None:
        """Bind the names of a pattern, and report a pattern that compares a text."""
        if labels & TEXT and isinstance(node, ast.MatchValue | ast.MatchSequence | ast.MatchMapping):
            self.report(node, "`match` on the text of an error")
        kind = node.pattern.cls if isinstance(node, ast.MatchAs) and isinstance(node.pattern, ast.MatchClass) else None
        if kind is not None and self.analysis.is_exception(_last_name(kind)):
            labels |= ERROR
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            self.write(node.name, labels)
        if isinstance(node, ast.MatchClass):
            for name, part in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
                self.pattern(part, self.attribute(labels, name))
        else:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.pattern):
                    self.pattern(part, labels)

    # Expressions

    def value(self, node: ast.AST | None) -> int:
        """Return the labels of the value of an expression."""
        match node:
            case None | ast.Constant():
                return 0
            case ast.Name(id=name):
                return self.read(name)
            case ast.NamedExpr(target=target, value=value):
                labels = self.value(value)
                self.bind(target, labels)
                return labels
            case ast.Attribute(value=value, attr=name):
                cell = self.attribute_cell(node)
                held = self.analysis.read(cell, self.context) if cell else 0
                return held | self.attribute(self.value(value), name)
            case ast.Call():
                return self.call(node)
            case ast.Compare():
                labels = self.union(node.left, *node.comparators)
                if labels & TEXT and not all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
                    self.report(node, "comparison with the text of an error")
                return 0
            case ast.JoinedStr(values=values):
                return TEXT if self.union(*values) else 0
            case ast.BinOp(left=left, op=ast.Mod(), right=right) if _is_text(left):
                return TEXT if self.union(left, right) else 0
            case ast.BinOp(left=left, op=operation, right=right):
                labels = self.union(left, right)
                if labels & TEXT and isinstance(operation, ast.BitAnd):
                    self.report(node, "set operation on the text of an error")
                return labels
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.value(operand)
                return 0
            case ast.Subscript(value=value, slice=index):
                if self.value(index) & TEXT and not isinstance(index, ast.Slice):
                    self.report(node, "look-up of the text of an error")
                return self.value(value)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.value(test)
                self.push_errors(node, self.narrowed(test))
                labels = self.value(body)
                self._inner.pop()
                return labels | self.value(orelse)
            case ast.BoolOp(op=ast.And(), values=values):
                labels = 0
                for value in values:
                    labels |= self.value(value)
                    self.push_errors(value, self.narrowed(value))
                del self._inner[-len(values) :]
                return labels
            case ast.Lambda():
                self.analysis.schedule(Context(self.analysis.scopes[node], outer=self.context))
                return 0
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self.comprehension(node)
            case ast.Yield(value=value) | ast.YieldFrom(value=value):
                self.give(value)
                return 0
        return self.union(*ast.iter_child_nodes(node))

    def union(self, *nodes: ast.AST) -> int:
        return _union([self.value(node) for node in nodes])

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> int:
        inner: dict[str, object] = {}
        for one in node.generators:
            labels = self.value(one.iter)
            for part in ast.walk(one.target):
                if isinstance(part, ast.Name):
                    inner[part.id] = (self.context, node, part.id)
            self._inner.append(inner)
            self.bind(one.target, labels)
            for test in one.ifs:
                self.value(test)
                for name in self.narrowed(test):
                    self.write(name, ERROR)
        parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        labels = self.union(*parts)
        del self._inner[-len(node.generators) :]
        return labels

    def attribute(self, labels: int, name: str) -> int:
        """Return the labels of an attribute of a value. Attributes of texts and of objects with a text are texts."""
        found = TEXT if labels & (TEXT | HOLDER) else 0
        if labels & ERROR:
            found |= (TEXT if name in TEXT_ATTRIBUTES else 0) | (ERROR if name in ERROR_ATTRIBUTES else 0)
        return found

    # Calls

    def call(self, node: ast.Call) -> int:
        given = Arguments()
        for one in node.args:
            if isinstance(one, ast.Starred):
                given.spread |= self.value(one.value)
            else:
                given.positional.append(self.value(one))
        for named in node.keywords:
            if named.arg is None:
                given.spread |= self.value(named.value)
            else:
                given.named[named.arg] = self.value(named.value)
        if isinstance(node.func, ast.Name):
            return self.call_name(node, node.func.id, given)
        if isinstance(node.func, ast.Attribute):
            return self.call_attribute(node, node.func, given)
        if isinstance(node.func, ast.Lambda):
            self.value(node.func)
            return self.apply(Context(self.analysis.scopes[node.func], outer=self.context), node, given)
        return self.value(node.func) | given.all

    def call_name(self, node: ast.Call, name: str, given: Arguments) -> int:
        if name == MATCHES or name in NO_TEXT:
            return 0
        if name in TO_TEXT:
            return TEXT if given.all else 0
        if name in ("getattr", "attrgetter") and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            rest = Arguments(given.positional[2:]).all
            return rest | self.attribute(given.positional[0], str(node.args[1].value))
        module, original = self.imported(name)
        if original in COMPARING_CALLS or module == "re":
            self.compare(node, given.all)
        if module == "traceback" and original.startswith("format"):
            return TEXT
        if module == "sys" and original in ("exc_info", "exception"):
            return ERROR
        return self.call_found(node, self.resolve(name), original or name, given)

    def call_found(
        self, node: ast.Call, found: list[tuple[Scope | Class, Context | None]], name: str, given: Arguments
    ) -> int:
        """Return the labels of the result of a call. ``found`` lists the functions and classes that may be called."""
        labels = 0
        for one, outer in found:
            if isinstance(one, Scope):
                labels |= self.apply(Context(one, outer=outer), node, given)
            elif "__init__" in one.methods:
                self.apply(Context(one.methods["__init__"], outer=outer), node, given, receiver=0)
        if self.analysis.is_exception(name):
            return ERROR
        if not found:
            return self.call_unknown(node, given)
        return labels | (HOLDER if given.all & TEXT and any(isinstance(one, Class) for one, _ in found) else 0)

    def call_attribute(self, node: ast.Call, func: ast.Attribute, given: Arguments) -> int:
        name, receiver = func.attr, self.value(func.value)
        module = self.module_of(func.value)
        if module in ("logging", "warnings") or (name in LOGS and node.args):
            return 0
        if name == MATCHES:
            return 0
        if module == "traceback" and name.startswith("format"):
            return TEXT
        if (module == "sys" and name in ("exc_info", "exception")) or (name == "exception" and not node.args):
            return ERROR
        if module == "re" or name in COMPARING_CALLS:
            self.compare(node, given.all)
        elif name in COMPARING and not (module and module.partition(".")[0] in self.analysis.roots):
            first = given.positional[0] if given.positional and name == "replace" else 0
            self.compare(node, receiver | (first if name == "replace" else given.all))
        elif name in LOOKUPS and given.positional:
            self.compare(node, given.positional[0], "look-up of")
        if name in TEXT_METHODS:
            return TEXT if receiver | given.all else 0
        if name in CHANGES:
            self.bind(func.value, given.all)
        if self.analysis.is_exception(name):
            return self.call_found(node, self.resolve_attribute(func, module), name, given)
        found = self.resolve_attribute(func, module, any_class=bool(given.all))
        if not found:
            return (receiver & ~HOLDER) | self.call_unknown(node, given)
        labels = receiver & TEXT
        for one, outer in found:
            if isinstance(one, Scope):
                through_class = isinstance(func.value, ast.Name) and self.resolve_class(func.value.id)
                is_bound = one.owner is not None and not one.is_static and not through_class
                labels |= self.apply(Context(one, outer=outer), node, given, receiver & ERROR if is_bound else None)
            else:
                labels |= self.call_found(node, [(one, outer)], name, given)
        return labels

    def compare(self, node: ast.AST, labels: int, what: str = "string operation on") -> None:
        if labels & TEXT:
            self.report(node, f"{what} the text of an error")

    def narrowed(self, test: ast.AST) -> list[str]:
        """Return the names that are errors if a test is true, as in `isinstance(name, SomeError)`."""
        match test:
            case ast.BoolOp(op=ast.And(), values=values):
                return [name for value in values for name in self.narrowed(value)]
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]):
                is_error = any(self.analysis.is_exception(_last_name(one)) for one in ast.walk(kinds))
                return [name] if is_error else []
        return []

    def push_errors(self, node: ast.AST, names: Iterable[str]) -> None:
        """Enter an inner scope in which some names are errors."""
        labels = {name: self.read(name) | ERROR for name in names}
        self._inner.append({name: (self.context, node, name) for name in labels})
        for name, one in labels.items():
            self.write(name, one)

    def call_unknown(self, node: ast.Call, given: Arguments) -> int:
        """Return the labels of the result of an unknown function.

        The result has the labels of the arguments. Functions among the arguments, as in `map` or `partial`, are called
        with the other arguments. The labels of the results of these calls are added.
        """
        if not given.all:
            return 0
        labels = given.all
        for part in (*node.args, *(one.value for one in node.keywords)):
            found: list[tuple[Scope | Class, Context | None]] = []
            if isinstance(part, ast.Lambda):
                found = [(self.analysis.scopes[part], self.context)]
            elif isinstance(part, ast.Name):
                found = self.resolve(part.id)
                labels |= TEXT if part.id in TO_TEXT else 0
            elif isinstance(part, ast.Attribute):
                found = self.resolve_attribute(part, self.module_of(part.value), any_class=False)
            for one, outer in found:
                if isinstance(one, Scope):
                    labels |= self.apply(Context(one, outer=outer), node, Arguments(spread=given.all), receiver=0)
        self._applied.pop(node, None)  # `assign` must use the labels of the unknown function's result.
        return labels

    def apply(self, context: Context, node: ast.AST, given: Arguments, receiver: int | None = None) -> int:
        """Return the labels of the result of a function for given arguments."""
        scope, labels = context.scope, dict[str, int]()
        names = [one.arg for one in scope.parameters]
        if scope.owner is not None and receiver is not None and names:
            labels[names.pop(0)] = receiver
        rest = 0
        for place, one in enumerate(given.positional):
            if place < len(names):
                labels[names[place]] = one
            else:
                rest |= one
        known = {*names, *(one.arg for one in scope.other_parameters)}
        for name, one in given.named.items():
            if name in known:
                labels[name] = one
            else:
                rest |= one
        for name in known if given.spread else ():
            labels[name] = labels.get(name, 0) | given.spread
        arguments = getattr(scope.node, "args", None)
        for extra in (arguments.vararg, arguments.kwarg) if arguments else ():
            if extra is not None:
                labels[extra.arg] = labels.get(extra.arg, 0) | rest
        tainted = frozenset((name, one & ~HOLDER) for name, one in labels.items() if one & ~HOLDER)
        context = Context(scope, tainted, context.outer)
        self.analysis.schedule(context, f"{self.scope.path}:{getattr(node, 'lineno', 0)}" if tainted else "")
        self._applied.setdefault(node, []).append(context)
        return self.analysis.read((context, "return"), self.context)

    # Names of functions and classes

    def imported(self, name: str) -> tuple[str, str]:
        """Return the module and the original name of an imported name. Return two empty strings for any other name."""
        scope: Scope | None = self.scope
        while scope is not None:
            if name in scope.imports:
                return scope.imports[name]
            scope = scope.outer
        return "", ""

    def module_of(self, node: ast.AST) -> str:
        """Return the module that an expression names, or ""."""
        path = _dotted(node)
        if not path:
            return ""
        first, _, rest = path.partition(".")
        module, original = self.imported(first)
        if not module and not original:
            return ""
        whole = f"{module}.{original}" if original else module
        if original and whole not in self.analysis.modules and module.partition(".")[0] in self.analysis.roots:
            return ""  # an object that one of the given files defines
        return f"{whole}.{rest}" if rest and not whole.endswith(rest) else whole

    def resolve(self, name: str) -> list[tuple[Scope | Class, Context | None]]:
        """Return the functions and classes that a name can refer to, each with its enclosing context."""
        context: Context | None = self.context
        while context is not None:
            for known in (context.scope.functions, context.scope.classes):
                if name in known:
                    return [(known[name], context)]
            context = context.outer
        module, original = self.imported(name)
        return self.find(module, original) if original else []

    def resolve_class(self, name: str) -> bool:
        return any(isinstance(one, Class) for one, _ in self.resolve(name))

    def find(self, module: str, name: str) -> list[tuple[Scope | Class, Context | None]]:
        """Return the function or class of a module. If the module only re-exports the name, search all modules."""
        exact = self.analysis.modules.get(module)
        if exact is not None and (name in exact.functions or name in exact.classes):
            one = exact.functions.get(name) or exact.classes[name]
            return [(one, Context(exact))]
        if module.partition(".")[0] not in self.analysis.roots and module not in ("", *self.analysis.modules):
            return []
        found: list[tuple[Scope | Class, Context | None]] = []
        for one in self.analysis.modules.values():
            for known in (one.functions, one.classes):
                if name in known:
                    found.append((known[name], Context(one)))
        return found

    def resolve_attribute(
        self, node: ast.Attribute, module: str, any_class: bool = True
    ) -> list[tuple[Scope | Class, Context | None]]:
        """Return the functions and methods that an attribute can refer to."""
        if module:
            return self.find(module, node.attr)
        owner = self.owner() if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else None
        if owner is not None and node.attr in owner.methods:
            methods = [owner.methods[node.attr]]
        elif isinstance(node.value, ast.Name) and (kinds := self.resolve(node.value.id)):
            methods = [
                one.methods[node.attr] for one, _ in kinds if isinstance(one, Class) and node.attr in one.methods
            ]
        elif any_class and node.attr not in BUILT_IN | COMPARING:
            methods = self.analysis.methods.get(node.attr, [])
        else:
            methods = []
        return [(one, self.outer_of(one)) for one in methods]

    def outer_of(self, scope: Scope) -> Context:
        """Return the context that encloses a method: the current context, an outer context, or the method's module."""
        context: Context | None = self.context
        while context is not None:
            if context.scope is scope.outer:
                return context
            context = context.outer
        assert scope.outer is not None
        return Context(scope.outer)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def python_files(root: object, *folders: str) -> Iterator[tuple[str, str]]:
    """Yield the path and source of each Python file in some folders of a project."""
    from pathlib import Path

    for folder in folders:
        for path in sorted((Path(str(root)) / folder).rglob("*.py")):
            yield path.relative_to(str(root)).as_posix(), path.read_text(encoding="utf-8")
