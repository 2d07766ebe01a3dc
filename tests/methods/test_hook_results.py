"""Tests of the checks of hooks: their names, and the values that they return."""

import pytest
import torch
from raising import raises

from lightning_fcl.callbacks import EWC, SCAFFOLD
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.methods import Method, Needs, with_prefix
from lightning_fcl.methods.hook_results import INVALID_HOOK, check_hooks


def make_method(vectorized=True, **hooks):
    """Return a method whose hooks return the given values. The server state is the tensor ``total``, shape (3,)."""
    functions = {name: lambda *args, v=value: v for name, value in hooks.items()}
    initial = {"init_server_state": lambda self, module: {"total": torch.zeros(3)}, "vectorizable": vectorized}
    return type("Custom", (Method,), initial | functions)()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("hook", "value", "kind"),
    [
        ("prepare_client_state", None, InvalidTypeError),
        ("prepare_client_state", {"count": 3}, InvalidTypeError),
        ("update_client_state", {"nested": {"w": torch.zeros(1)}}, InvalidTypeError),
        ("end_experience", [torch.zeros(1)], InvalidTypeError),
        ("init_server_state", {"total": 0.0}, InvalidTypeError),
        ("upload_statistics", {"total": 1}, InvalidTypeError),
        ("upload_statistics", {"totals": torch.zeros(3)}, UnknownNameError),
        ("upload_statistics", {"total": torch.zeros(4)}, InvalidValueError),
        ("contribute_experience", {"total": torch.zeros(1, 3)}, InvalidValueError),
        ("contribute_experience", None, InvalidTypeError),
        ("message", {"x": 1}, InvalidTypeError),
        ("reply", 3, InvalidTypeError),
        ("process_aggregate", {"model.missing": torch.zeros(1)}, UnknownNameError),
        ("process_aggregate", {"model.weight": torch.zeros(1)}, InvalidValueError),
        ("process_aggregate", None, InvalidTypeError),
        ("penalty", torch.zeros(1), InvalidValueError),
        ("penalty", None, InvalidTypeError),
        ("update_client_state", {1: torch.zeros(1)}, InvalidTypeError),
        ("transform_upload", None, InvalidTypeError),
        ("transform_upload", {"model.missing": torch.zeros(1)}, UnknownNameError),
        ("transform_upload", {}, InvalidValueError),
    ],
)
def test_hook_invalid_result_raises(fit, make_stream, make_task, hook, value, kind, size):
    method = make_method(**{hook: value})
    method.reductions = {"total": "sum"}
    task = make_task()
    if hook == "process_aggregate" and value and "model.weight" in value:
        value[next(iter(task.state_dict()))] = value.pop("model.weight")
    with raises(kind, hook, code=INVALID_HOOK):
        fit(task, make_stream(num_experiences=1, rounds_per_experience=1), [method], max_vectorized_clients=size)


@pytest.mark.parametrize(("value", "kind"), [(None, InvalidTypeError), (torch.zeros(3), InvalidValueError)])
def test_project_gradient_invalid_result_raises(fit, make_stream, make_task, value, kind):
    with raises(kind, "project_gradient", code=INVALID_HOOK):
        fit(make_task(), make_stream(), [make_method(vectorized=False, project_gradient=value)])


def test_hook_valid_results_are_accepted(fit, make_stream, make_task):
    state, upload = {"own": torch.zeros(2)}, {"total": torch.ones(3)}
    method = make_method(
        prepare_client_state=state, update_client_state=state, upload_statistics=upload, process_aggregate={}, penalty=0
    )
    fit(make_task(), make_stream(), [method])


def test_check_hooks_similar_name_with_same_arguments_raises():
    class Misspelled(Method):
        def update_client_memory(self, client, trained_state, data):
            return {}

    with raises(UnknownNameError, "update_client_memory", code=INVALID_HOOK):
        check_hooks(Misspelled())


def test_check_hooks_helpers_are_accepted():
    class Helpers(Method):
        def update_client_memory(self, client):
            return {}

        def importance(self, client, trained_state, data):
            return {}

        def _update_client_memory(self, client, trained_state, data):
            return {}

    check_hooks(Helpers())


@pytest.mark.parametrize("hook", ["upload_statistics", "contribute_experience"])
def test_check_hooks_upload_without_server_state_raises(hook):
    kind = type("Uploads", (Method,), {hook: lambda self, client, trained_state, data: {}})
    with raises(InvalidValueError, "init_server_state", code=INVALID_HOOK):
        check_hooks(kind())


class Remembers(Method):
    """A method that records what `end_experience` receives."""

    needs = Needs(round_samples=True)

    def __init__(self):
        super().__init__()
        self.received = []

    def init_server_state(self, module):
        return with_prefix(dict(module.named_parameters()), "anchor")

    def end_experience(self, client, trained_state, data):
        names = {*client.module.state_dict()}
        self.received.append((client.client_round.client_id, {*trained_state} == names, {*client.server_state}))
        return client.method_state


class Breaks(Method):
    """A method that makes the loss of client 1 non-finite in the last round."""

    vectorizable = False

    def penalty(self, client, step):
        broken = client.client_round.client_id == "1" and client.client_round.round_idx == 1
        return sum(value.sum() for value in step.params.values()) * (float("nan") if broken else 0.0)


def test_end_experience_after_dropped_upload_gets_model_and_server_state(fit, make_stream, make_task):
    method, task = Remembers(), make_task()
    fit(task, make_stream(num_experiences=1, rounds_per_experience=2), [Breaks(), method], seed=0)
    anchors = {f"anchor.{name}" for name, _ in task.named_parameters()}
    assert {client for client, _, _ in method.received} == {"0", "1", "2"}
    assert all(is_model and entries == anchors for _, is_model, entries in method.received)


def test_ewc_beside_scaffold_after_dropped_upload_trains(fit, make_stream, make_task):
    stream = make_stream(num_experiences=1, rounds_per_experience=2)
    fit(make_task(), stream, [Breaks(), SCAFFOLD(), EWC()], seed=0, client_weights="uniform")


def test_end_experience_after_stopped_fit_gets_model_and_server_state(fit, make_stream, make_task):
    method, task = Remembers(), make_task()
    stream = make_stream(num_experiences=1, rounds_per_experience=3)
    fit(task, stream, [method, _Stop()], seed=0)
    assert len(method.received) == 3
    assert all(is_model and entries for _, is_model, entries in method.received)


class _Stop(Method):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True
