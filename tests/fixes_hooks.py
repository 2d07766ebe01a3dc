"""Table of hints in the error messages about the hooks of methods."""

import torch
from fixes import Row, fit_one_round

from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.methods import Method

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


def fit_hook(lab, declare=True, **hooks):
    """Fit a method whose hooks return the given values. ``declare``: whether the method has server state."""
    functions = {name: value if callable(value) else lambda *args, v=value: v for name, value in hooks.items()}
    if declare:
        functions["init_server_state"] = lambda self, module: {"total": torch.zeros(3)}
    return fit_one_round(lab, callbacks=[type("Custom", (Method,), functions)()])


def fit_named(lab, name):
    """Fit a method with a function of the given name and the arguments of `Method.update_client_state`."""

    def function(self, client, trained_state, data):
        return {}

    return fit_one_round(lab, callbacks=[type("Custom", (Method,), {name: function})()])


ROWS |= {
    "hook that returns None": Row(
        fit_hook,
        {"update_client_state": None},
        {"update_client_state": {}},
        "Return tensors by name, or {} for no tensors.",
        InvalidTypeError,
        argument="update_client_state",
    ),
    "hook that returns a number": Row(
        fit_hook,
        {"upload_statistics": {"total": 3.0}},
        {"upload_statistics": {"total": torch.full((3,), 3.0)}},
        "Store numbers with `torch.tensor`",
        InvalidTypeError,
        argument="upload_statistics",
    ),
    "penalty per sample": Row(
        fit_hook,
        {"penalty": lambda self, client, step: step.output.square().mean(dim=1)},
        {"penalty": lambda self, client, step: step.mean(step.output.square().mean(dim=1))},
        "Return `step.mean(values)` for a value per sample",
        InvalidValueError,
        argument="penalty",
    ),
    "penalty that is None": Row(
        fit_hook,
        {"penalty": None},
        {"penalty": 0.0},
        "Return 0.0 for no penalty.",
        InvalidTypeError,
        argument="penalty",
    ),
    "upload without server state": Row(
        fit_hook,
        {"upload_statistics": {"total": torch.ones(3)}, "declare": False},
        {"upload_statistics": {"total": torch.ones(3)}, "declare": True},
        "Return the initial value of each uploaded tensor in `init_server_state`.",
        InvalidValueError,
        argument="init_server_state",
    ),
    "name almost like a hook": Row(
        fit_named,
        {"name": "update_client_states"},
        {"name": "_update_client_states"},
        "If the function is not a hook, start its name with an underscore.",
        UnknownNameError,
        argument="update_client_states",
    ),
}
