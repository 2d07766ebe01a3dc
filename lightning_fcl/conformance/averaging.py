"""What holds of methods for unlike clients: where each is FedAvg, and what its server has."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_fcl.conformance.trial import Net, assert_close, assert_same, make, states, task_of, train, trial_stream
from lightning_fcl.methods.client import Client, Step
from lightning_fcl.methods.method import Method
from lightning_fcl.models.lora import LoRA


def _is_fedavg_with(claim: str, **arguments: Any) -> None:
    said = " and ".join(f"{name} = {value}" for name, value in arguments.items())

    @states(claim, f"with {said} it is FedAvg")
    def _(kind: type[Method]) -> None:
        assert_same(train([make(kind, **arguments)]), train(), f"with {said}")


_is_fedavg_with("FedProx", mu=0.0)
_is_fedavg_with("FedProto", strength=0.0)
_is_fedavg_with("LogitAdjustment", tau=0.0)
_is_fedavg_with("FedNTD", beta=0.0)
_is_fedavg_with("MOON", mu=0.0)
_is_fedavg_with("FedDyn", alpha=0.0)
_is_fedavg_with("EWC", strength=0.0)
_is_fedavg_with("MAS", strength=0.0)
_is_fedavg_with("SI", strength=0.0)
_is_fedavg_with("LwF", strength=0.0)
_is_fedavg_with("TARGET", kd=0.0)
_is_fedavg_with("TARGET", images=0)


@states("FedProx", "the penalty is mu / 2 times the squared distance from what the client has received")
def _(kind: type[Method]) -> None:
    draws = torch.Generator().manual_seed(0)
    received = {"w": torch.randn(5, generator=draws), "b": torch.randn(3, generator=draws)}
    params = {name: value + torch.randn(value.shape, generator=draws) for name, value in received.items()}
    apart = sum(float((params[name] - value).square().sum()) for name, value in received.items())
    nothing = torch.empty(0)
    for given, wanted in ((received, 0.0), (params, 0.3 / 2 * apart)):
        client, step = Client(server=received), Step(given, received, nothing, nothing, lambda state, x: x)
        found = float(make(kind, mu=0.3).penalty(client, step))
        if abs(found - wanted) > 1e-5:
            raise AssertionError(f"the penalty is {found:.6f} and not {wanted:.6f}")


def is_fedavg_in(claim: str, says: str, tasks: int = 2, rounds: int = 2, clients: int = 3, batch_size: int = 8) -> None:
    """State of a method that in such a stream it is FedAvg."""

    @states(claim, f"{says}: it is FedAvg")
    def _(kind: type[Method]) -> None:
        stream = partial(trial_stream, clients, tasks, rounds, batch_size=batch_size)
        found, wanted = (train(methods, stream()) for methods in ([make(kind)], []))
        assert_same(found, wanted, says)


is_fedavg_in("FedProx", "in a round of one step no client has moved yet when it takes it", batch_size=240)
is_fedavg_in("SCAFFOLD", "in the first round no client has a variate", tasks=1, rounds=1)
is_fedavg_in("SCAFFOLD", "in rounds of one step corrections add up to nothing over all clients", batch_size=240)
is_fedavg_in("SCAFFOLD", "of a single client there is nothing to correct", clients=1)
is_fedavg_in("FedNova", "where all clients take equally many steps all count alike", batch_size=240)
is_fedavg_in("RegMean", "a single client gets its own weights back", clients=1)
is_fedavg_in(
    "LogitAdjustment", "of a client with equally many samples of each class no logit moves", tasks=1, clients=1
)


@states("LoRM", "of a single client one round trains B and the head, and where tasks come together says the same")
def _(kind: type[Method]) -> None:
    outcomes = []
    for methods, train_a in (([make(kind)], True), ([], False)):
        stream, task = trial_stream(clients=1, tasks=1, rounds=1), task_of()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            task.model = LoRA(Net(), rank=2, train_a=train_a)
        train(methods, stream, task)
        outcomes.append({"outputs": task(stream.take(stream.plan.test)[0].double())})
    assert_close(outcomes[0], outcomes[1], "after a round of one client", 1e-8)


def _server_is_fedavg(claim: str) -> None:
    @states(claim, "the server's model is FedAvg's: what clients make of it for themselves stays with them")
    def _(kind: type[Method]) -> None:
        assert_same(train([make(kind)]), train(), "the server's model")


_server_is_fedavg("APFL")
_server_is_fedavg("Ditto")


@states("FedRep", "heads never leave the clients: the server's is what it was, its body learns")
def _(kind: type[Method]) -> None:
    before, after = task_of().double(), train([make(kind)])
    heads, bodies = (
        [{name: value for name, value in task.state_dict().items() if part in name} for task in (before, after)]
        for part in (".head.", ".body.")
    )
    assert_close(heads[1], heads[0], "the server's head", tolerance=0)
    if all(torch.equal(*pair) for pair in zip(*(body.values() for body in bodies), strict=True)):
        raise AssertionError("the server's body has not learnt, either")
