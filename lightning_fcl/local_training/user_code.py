"""Analysis of user code in a training step: reachable functions, used names, and whether a trial can run the code."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any

# Maximum number of functions that are inspected.
_MOST = 2_000
_PACKAGES = frozenset(
    {
        *("lightning", "pytorch_lightning", "lightning_fcl", "lightning_utilities", "torch", "torchvision"),
        *("torchaudio", "torchmetrics", "numpy", "scipy", "sklearn", "pandas", "builtins", "einops"),
        # pytest replaces `assert` by calls of its own functions, from which all collected tests are reachable.
        *("typing_extensions", "pytest", "_pytest", "pluggy"),
        *sys.stdlib_module_names,
    }
)
# Functions and packages that write files or communicate with other processes.
_OUTWARD = frozenset(
    {
        *("open", "save", "savez", "savez_compressed", "savetxt", "savefig", "save_image", "save_checkpoint"),
        *("save_file", "save_pretrained", "save_model", "imsave", "imwrite", "dump", "tofile", "to_csv", "to_json"),
        *("to_parquet", "to_pickle", "to_excel", "write", "writelines", "writerow", "writerows", "write_text"),
        *("write_bytes", "mkdir", "makedirs", "touch", "unlink", "rmdir", "rmtree", "rename", "system", "Popen"),
        *("urlopen", "urlretrieve", "sendall", "push_to_hub", "subprocess", "shutil", "socket", "requests", "httpx"),
        *("sqlite3", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "aim", "boto3", "smtplib", "redis"),
    }
)
# Hooks that run before the step is complete. They can change the batch, the loss, the gradients or the weights.
_EARLY = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step",),
)
STEP_HOOKS = (*_EARLY, "on_train_batch_end", "on_client_end")
"""Names of the callback hooks that run for each client: during its local training, or at the end."""


def is_users(kind: type | ModuleType | FunctionType) -> bool:
    """Return whether a class, module or function is user code, and not part of Python or of a known package."""
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    return str(name).split(".")[0] not in _PACKAGES


def user_classes(kind: type) -> list[type]:
    """Return the user classes among a class and all its parents."""
    return [one for one in kind.__mro__ if is_users(one)]


def functions_in(kind: type) -> dict[str, FunctionType]:
    """Return the user functions of a class and its parents, by name."""
    functions: dict[str, FunctionType] = {}
    for user_class in reversed(user_classes(kind)):
        for name, value in vars(user_class).items():
            if (function := _function(value)) is not None:
                functions[name] = function
    return functions


def _function(value: object) -> FunctionType | None:
    """Return the function behind a method, a property or a decorated function, or None if it is not user code."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property | functools.partial):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    try:
        value = inspect.unwrap(value) if callable(value) else value
    except Exception:  # A placeholder for a missing package raises an error for each attribute.
        return None
    return value if isinstance(value, FunctionType) and is_users(value) else None


@functools.lru_cache(10_000)
def names_in(code: CodeType) -> Set[str]:
    """Return the names of the attributes and global variables in a code object."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for one in inner for name in names_in(one))}


@functools.lru_cache(10_000)
def globals_in(code: CodeType) -> Set[str]:
    """Return the names of the global variables that a code object reads or assigns."""
    global_names = {str(i.argval) for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME"))}
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*global_names, *(name for one in inner for name in globals_in(one))}


def reached(functions: Iterable[FunctionType], class_functions: dict[str, FunctionType]) -> list[FunctionType]:
    """Return the user functions that some functions can call, including the functions themselves.

    At most `_MOST` functions are returned.

    Args:
        functions: The functions.
        class_functions: Functions of the class to which the functions belong, by name.
    """
    todo, visited_ids, reached_functions = [*functions], set[int](), list[FunctionType]()
    while todo and len(reached_functions) < _MOST:
        function = todo.pop()
        if id(function) in visited_ids:
            continue
        visited_ids.add(id(function))
        reached_functions.append(function)
        todo += [class_functions[name] for name in names_in(function.__code__) if name in class_functions]
        for value in (*_globals_of(function), *closure_of(function).values()):
            if isinstance(value, type) and is_users(value):
                todo += functions_in(value).values()
            elif (other := _function(value)) is not None:
                todo.append(other)
    return reached_functions


def _globals_of(function: FunctionType) -> Iterator[Any]:
    for name in globals_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and is_users(value):
            yield from (vars(value).get(other) for other in names_in(function.__code__))
        yield value


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the values of a function's closure variables by name."""
    values_by_name = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values_by_name[name] = cell.cell_contents
        except ValueError:  # The variable has no value yet.
            continue
    return values_by_name


def outward(functions: Iterable[FunctionType]) -> str | None:
    """Return a name of a file or network operation that the functions use, or None. See `_OUTWARD`."""
    used_names = {name for function in functions for name in names_in(function.__code__)}
    return min(used_names & _OUTWARD, default=None)


def can_change_steps(kind: type) -> bool:
    """Return whether the hooks of a callback may change a step.

    The hooks may change a step if a hook runs before the step is complete, or if a hook may write to other objects.
    """
    class_functions = functions_in(kind)
    hooks = [class_functions[name] for name in STEP_HOOKS if name in class_functions]
    return any(name in class_functions for name in _EARLY) or any(map(_writes, reached(hooks, class_functions)))


def _writes(function: FunctionType) -> bool:
    """Return whether a function may change tensors in place, or write to objects other than its first argument."""
    names = names_in(function.__code__)
    if any(name.endswith("_") and not name.endswith("__") for name in names) or names & {"setattr", "load_state_dict"}:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # Without source code, the function may write.
        return True
    first_argument, *other_names = [*function.__code__.co_varnames[: function.__code__.co_argcount], ""]
    for node in ast.walk(tree):
        target = node.target if isinstance(node, ast.AugAssign) else node
        if isinstance(target, ast.Name) and target is not node and target.id in other_names:
            return True
        if isinstance(target, ast.Attribute | ast.Subscript) and not isinstance(target.ctx, ast.Load):
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if not (isinstance(target, ast.Name) and target.id == first_argument):
                return True
    return False
