"""What a parser has refused, in one sentence: the argument, the value, and the nearest that there is."""

from __future__ import annotations

import inspect
import re
import sys
from pkgutil import resolve_name

import lightning.pytorch as L
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import torch

from lightning_fcl.data.partition import IID, ClassSubsets, Dirichlet, Natural, Shards
from lightning_fcl.data.scenarios import (
    ClassIncremental,
    DomainIncremental,
    FedViTScenario,
    FLwFScenario,
    ODFCLScenario,
)
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.door import summaries
from lightning_fcl.errors import did_you_mean

_TOP = ("model", "data", "trainer", "recipe", "out", "seed_everything", "ckpt_path", "config", "print_config")
_DEALT = {
    "partition": (Natural, IID, Dirichlet, Shards, ClassSubsets),
    "scenario": (ClassIncremental, DomainIncremental, FLwFScenario, FedViTScenario, ODFCLScenario),
}
_NO_ATTRIBUTE = re.compile(r"module [`']([\w.]+)[`'] has no attribute [`'](\w+)[`']")
_NO_NAME = re.compile(r"You selected an invalid (\w+) name: `\w+='(\w+)'`")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_NO_OPTION = re.compile(r"class_path '([\w.]+)': (?:Group '\w+' does not accept option|Option) '(\w+)'")
_NO_KEY = re.compile(r"(?:does not accept option '|unrecognized arguments: --)([\w.+]+)")
_NO_VALUE = re.compile(
    r'Parser key "([\w.]+)": (?:Does not validate.*Errors: )?(.*?) Given value(?: type: .*?Given value)?: (.*)$'
)
_AMBIGUOUS = re.compile(r"Multiple subclasses with name (\w+)\. .*?avoid ambiguity: ([\w., ]+\w)")
_SHORTHAND = re.compile(r"Given value: (\[?\{'([\w.]+\.\w+)': \{.*)$")
_INNER = re.compile(r"Parser key \"(\w+)\": Expected an? <class '(?:\w+\.)*(\w+)'>\. Got value: (\S+)")
_NESTED = re.compile(r"(.*?) Given value type: .*NestedArg\(key='([\w.]+)'")
_NO_METRIC = re.compile(
    r"(?:conditioned on metric `|monitor=')(.*?)['`]\)?`? (?:which is not|could not find)(.*)", re.DOTALL
)
_KINDS = re.compile(r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*?)\])")


def remedy(message: str) -> str:
    """A parser's message, shorter and with a remedy; as it is where it is of no kind that is known here.

    Example:
        >>> remedy("Problem with given class_path 'torch.optim.SDG': module 'torch.optim' has no attribute 'SDG'")
        'Expected a class of torch.optim but it has no SDG. Did you mean SGD?'
    """
    text = " ".join(message.split())
    if found := _NO_ATTRIBUTE.search(text):
        module, name = found.groups()
        known = getattr(sys.modules[module], "__all__", dir(sys.modules[module]))
        return f"Expected a class of {module} but it has no {name}.{did_you_mean(name, known)}"
    if found := _NO_NAME.search(text):
        return (
            f"{text.partition(' It must be')[0]}{did_you_mean(found[2], ['federated', 'auto', 'cpu', 'gpu', 'cuda'])}"
        )
    if found := _NO_MODULE.search(text):
        whole = re.search(rf"\b{re.escape(found[1])}[\w.]*\.\w+", text)
        path = whole[0] if whole else found[1]
        return f"Expected the path of a class but got {path}: there is no module {found[1]}. Mend its name."
    if found := _AMBIGUOUS.search(text):
        ours = [path for path in found[2].split(", ") if path.startswith("lightning_fcl.")]
        hint = f" Did you mean {ours[0]}?" if ours else f" They are {found[2]}."
        return f"Expected the path of a class but got {found[1]}, of which there are several.{hint}"
    if found := _NO_PATH.search(text):
        hint = did_you_mean(found[1], _short_names())
        return f"Expected a class's path, as in lightning_fcl.callbacks.Replay, but got {found[1]}.{hint}"
    if found := _NO_OPTION.search(text):
        path, name = found.groups()
        known = _arguments(path)
        hint = did_you_mean(name, known) or (f" It takes {', '.join(known)}." if known else "")
        return f"Expected arguments of {path} but got `{name}`.{hint}"
    if found := _NO_KEY.search(text):
        return _no_key(found[1])
    if "arguments are required" in text and "model" in text:
        return "Expected a recipe with a `model` but got none. Name one, as in lightning-fcl fit quickstart."
    if found := re.fullmatch(r"Unexpected config: ?(.*)", text):
        got = found[1] or "nothing"
        return f"Expected a recipe to hold settings by name, as in trainer: {{max_epochs: 3}}, but got {got}."
    if "is not accepted" in text and (found := _SHORTHAND.search(text)):
        return f"Expected {{class_path: {found[2]}, init_args: {{...}}}} but got {found[1]}."
    if found := _INNER.search(text):
        return f"Expected `{found[1]}` to be of {found[2]} but got {found[3]}."
    if found := _NO_VALUE.search(text):
        name, errors, value = found.groups()
        if nested := _NESTED.match(value):
            value, name = nested[1], f"{name}.{nested[2]}"
        kinds = [kind or choices for kind, choices in _KINDS.findall(errors)]
        if kinds and "class_path" not in errors:
            wanted = " or ".join(dict.fromkeys("null" if kind == "NoneType" else kind for kind in kinds))
            return f"Expected `{name}` to be of {wanted} but got {value}."
    return message


def refused_by_lightning(message: str) -> str:
    """What Lightning has refused, by its argument, its value and what to do; empty where it is of no kind known here.

    Example:
        >>> refused_by_lightning("-1 is not in bounds, numpy accepts from 0 to 4294967295")
        'Expected `seed_everything` to be from 0 to 4294967295 but got -1.'
    """
    if "You selected an invalid" in message:
        return remedy(message)
    if found := re.match(r"(-?\d+) is not in bounds, numpy accepts from 0 to (\d+)", message):
        return f"Expected `seed_everything` to be from 0 to {found[2]} but got {found[1]}."
    if found := _NO_METRIC.search(message):
        there = re.findall(r"[`']([^`',]+/[^`',]+)[`']", found[2])
        hint = did_you_mean(found[1], there) or f" There are {', '.join(there)}."
        return f"Expected `monitor` to be a metric that is logged but got {found[1]}.{hint}"
    if found := re.search("more than one stateful callback of type `(\\w+)`", message):
        return f"Expected one `{found[1]}` among the callbacks but got several. Leave all but one out."
    if "`devices` selected with" in message:
        return "Expected `trainer.devices` to be 1 in a federation but got another number. Set it, or leave it out."
    if "backend found" in message or "torch_xla" in message:
        return f"Expected an accelerator that this machine has but: {message} Use `--trainer.accelerator cpu`."
    return ""


def _short_names() -> list[str]:
    """The classes that recipes may name without their path."""
    ours = [name for package in ("methods", "models") for name in summaries(f"lightning_fcl.{package}")]
    ours += ["FederatedStrategy", "TopK", "Quantize", "Swarm"]
    return [*ours, *torch.optim.__all__, *lightning.pytorch.callbacks.__all__, *lightning.pytorch.loggers.__all__]


def _no_key(key: str) -> str:
    section, _, name = key.removesuffix("+").partition(".")
    if section not in _TOP:
        return f"Expected {', '.join(_TOP[:3])} or the like but got `{section}`.{did_you_mean(section, _TOP)}"
    known = list(inspect.signature(L.Trainer).parameters) if section == "trainer" else []
    if section == "data":
        known = list(inspect.signature(FederatedStream).parameters)
        known += [
            f"{what}.{one}"
            for what, kinds in _DEALT.items()
            for kind in kinds
            for one in inspect.signature(kind).parameters
        ]
    ends = {one.rpartition(".")[2]: one for one in reversed(known)}
    near = did_you_mean(name.rpartition(".")[2], ends).removeprefix(" Did you mean ").rstrip("?")
    hint = f" Did you mean {section}.{ends[near]}?" if near else ""
    return f"Expected arguments of `{section}` but got `{key}`.{hint}"


def _arguments(path: str) -> list[str]:
    try:
        return list(inspect.signature(resolve_name(path)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
