"""What a parser or Lightning has refused: the reason in its own words, and the nearest name that there is."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

import lightning.pytorch as L
import torch
import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks, loggers

from lightning_fcl.annotations import accepts, argument_types, explain
from lightning_fcl.data.partition import Partition
from lightning_fcl.data.scenarios import Scenario
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.door import summaries
from lightning_fcl.errors import InvalidValueError, did_you_mean, other_lightning
from lightning_fcl.hub.documents import resolve_maker
from lightning_fcl.simulation.hooks import RESTORED

BY_LIGHTNING, NOT_UNDERSTOOD = (
    "Lightning refuses the recipe or command line:",
    "the recipe or command line is not understood:",
)
_TOP = ("model", "data", "trainer", "recipe", "out", "seed_everything", "ckpt_path", "config", "print_config")
_ATTRIBUTE = re.compile(r"module [`']([\w.]+)[`'] has no attribute [`'](\w+)[`']")
_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_KIND = re.compile(r"Import path ([\w.]+) does not correspond to a subclass")
_OPTION = re.compile(r"class_path '([\w.]+)': (?:Group '\w+' does not accept option|Option) '(\w+)'")
_CALLED = re.compile(r"Option '(\w+)' is not accepted\. Got value: Namespace\(.*?class_path='([\w.]+)'\)")
_KEY = re.compile(r"(?:(?:Group '([\w.]+)' )?does not accept option '|unrecognized arguments: --)([\w.+]+)")
_SHORTHAND = re.compile(r"is not accepted.*Given value: (\[?\{'([\w.]+\.\w+)': \{.*)$")
_UNLIKE = re.compile(r'.*Parser key "([\w.]+)": (?:Does not validate.*?Errors: - )?(.*?(?:Given|Got) value: \S+)')
_VALUE = re.compile(r'(?:Given|Got) value: (?:"([^"]*)"|([^\s\[{"]\S*))')
_CLASS_PATH = re.compile(r"class_path '([\w.]+)': $")
_NAME = re.compile(r"You selected an invalid \w+ name: `\w+='(\w+)'`")
_METRIC = re.compile(r"(?:conditioned on metric `|monitor=')(.*?)['`]\)?`? (?:which is not|could not find)(.*)", re.S)
_LIGHTNING = {
    r"(-?\d+) is not in bounds, numpy accepts from 0 to (\d+)": (
        r"Expected `seed_everything` to be from 0 to \2 but got \1."
    ),
    r"more than one stateful callback of type `(\w+)`": (
        r"Expected one `\1` among the callbacks but got several. Leave all but one out."
    ),
    "`devices` selected with": (
        "Expected `trainer.devices` to be 1 in a federation but got another number. Set it, or leave it out."
    ),
    r"(?s)^(.*(?:backend found|torch_xla).*)$": (
        r"Expected an accelerator that this machine has but: \1 Use `--trainer.accelerator cpu`."
    ),
}


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What a parser or Lightning refuses in this block is a ValueError with a remedy."""
    try:
        yield
    except ArgumentError as error:
        raise ValueError(f"{NOT_UNDERSTOOD} {remedy(str(error))}") from error
    except MisconfigurationException as error:
        raise ValueError(refused_by_lightning(str(error)) or f"{BY_LIGHTNING} {error}") from error
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if said := refused_by_lightning(str(error)):
            raise ValueError(said) from error
        restored = [note for note in getattr(error, "__notes__", []) if note.endswith(RESTORED)]
        if not restored or isinstance(error, ImportError | ValueError):
            raise
        raise InvalidValueError(
            f"Expected a checkpoint of this recipe but {restored[0]} and gave {type(error).__name__}: {error}.",
            hint="Continue from another one, or start without `ckpt_path`.",
        ) from error


def remedy(message: str) -> str:
    """A parser's message: the innermost reason alone, with the nearest name."""
    text = " ".join(re.sub(r"Given value type: <class '[\w.]+'>", "", message).split())
    if found := _ATTRIBUTE.search(text):
        module, name = found.groups()
        known = getattr(sys.modules[module], "__all__", dir(sys.modules[module]))
        return f"Expected a class of {module} but it has no {name}.{did_you_mean(name, known)}"
    if found := _PATH.search(text):
        ours = [name for package in ("methods", "models") for name in summaries(f"lightning_fcl.{package}")]
        ours += ["FederatedStrategy", "TopK", "Quantize", "Swarm", *torch.optim.__all__]
        hint = did_you_mean(found[1], [*ours, *callbacks.__all__, *loggers.__all__])
        if found[1] in summaries("lightning_fcl.data.scenarios"):  # within another
            hint = f" Write lightning_fcl.data.scenarios.{found[1]}."
        return f"Expected a class's path, as in lightning_fcl.callbacks.Replay, but got {found[1]}.{hint}"
    if found := _KIND.search(text):
        kind = resolve_name(found[1])
        if not isinstance(kind, type):
            return f"Expected a class but got {found[1]}, a {type(kind).__name__}. Name a class in `class_path`."
        if reason := other_lightning(kind):
            return reason
    if (found := _OPTION.search(text)) or (found := _CALLED.search(text)):
        path, name = found.groups() if found.re is _OPTION else found.groups()[::-1]
        known = list(inspect.signature(resolve_name(path)).parameters)
        return f"Expected arguments of {path} but got `{name}`.{_nearest(name, known)}"
    if found := _KEY.search(text):
        return _no_key(".".join(filter(None, found.groups())).removesuffix("+"))
    if "arguments are required" in text and "model" in text:
        return "Expected a recipe with a `model` but got none. Name one, as in lightning-fcl fit quickstart."
    if text.startswith("Unexpected config:"):
        got = text.removeprefix("Unexpected config:").strip() or "nothing"
        return f"Expected a recipe to hold settings by name, as in trainer: {{max_epochs: 3}}, but got {got}."
    if found := _SHORTHAND.search(text):
        return f"Expected {{class_path: {found[2]}, init_args: {{...}}}} but got {found[1]}."
    if said := _wrong_type(text):
        return said
    return f"{found[1]}: {found[2]}" if (found := _UNLIKE.match(text)) else message


def _wrong_type(text: str) -> str:
    """Return the message that Python would give about a value of another type; empty if the argument is not found."""
    before, _, rest = text.rpartition('Parser key "')
    key, _, reason = rest.partition('": ')
    value, path = _VALUE.search(reason), _CLASS_PATH.search(before)
    owner = resolve_name(path[1]) if path else FederatedStream if re.fullmatch(r"data\.\w+", key) else None
    if owner is None or value is None:
        return ""
    name = key.rpartition(".")[2]
    hint, default = argument_types(owner).get(name, (Any, None))
    written = value[1] or value[2]
    read = yaml.safe_load(written)
    given = written if accepts(read, hint) else read  # a number that is accepted was written as a string
    return "" if accepts(given, hint) else explain(name, given, hint, default)


def refused_by_lightning(message: str) -> str:
    """What Lightning has refused, and what to do; empty where it is of no kind that is known here."""
    if found := _NAME.search(message):
        return message.partition(" It must be")[0] + did_you_mean(found[1], ["federated", "auto", "cpu", "gpu", "cuda"])
    if found := _METRIC.search(message):
        hint = _nearest(found[1], re.findall(r"[`']([^`',]+/[^`',]+)[`']", found[2]))
        return f"Expected `monitor` to be a metric that is logged but got {found[1]}.{hint}"
    known = ((re.search(pattern, message), sentence) for pattern, sentence in _LIGHTNING.items())
    return next((found.expand(sentence) for found, sentence in known if found), "")


def _nearest(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known) or f" There are {', '.join(known)}."


def _no_key(key: str) -> str:
    section, _, name = key.partition(".")
    if section not in _TOP:
        return f"Expected {', '.join(_TOP[:3])} or the like but got `{section}`.{did_you_mean(section, _TOP)}"
    owners: dict[str, list[tuple[str, type]]] = {"trainer": [("", L.Trainer)], "data": [("", FederatedStream)]}
    owners["data"] += [("partition.", kind) for kind in Partition.__subclasses__()]
    owners["data"] += [("scenario.", kind) for kind in Scenario.__subclasses__()]
    arguments = [
        (before, one) for before, kind in owners.get(section, []) for one in inspect.signature(kind).parameters
    ]
    known = {one: f"{section}.{before}{one}" for before, one in reversed(arguments)}
    near = did_you_mean(name.rpartition(".")[2], known).removeprefix(" Did you mean ").rstrip("?")
    return f"Expected arguments of `{section}` but got `{key}`.{f' Did you mean {known[near]}?' if near else ''}"


def check_class_paths(content: object) -> None:
    """Refuse a ``class_path`` that is neither a class nor a function which says what it makes."""
    content = vars(content) if isinstance(content, Namespace) else content
    if isinstance(content, Mapping) and isinstance(path := content.get("class_path"), str):
        resolve_maker(path)
    for part in content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else []:
        check_class_paths(part)
