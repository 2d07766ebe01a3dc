"""Every statement holds of the library's own method, and fails on a mutant of it."""

import dataclasses
import random

import pytest
import torch

from lightning_fcl import RidgeClassifier, methods
from lightning_fcl.conformance import NotApplicableError, get_statements
from lightning_fcl.conformance.fixtures import STATEMENTS
from lightning_fcl.methods import Method

get_statements(Method)  # all are stated now


def squares(step):
    return sum(value.square().sum() for value in step.params.values())


class Plain(Method):
    """FedAvg."""


class DrawsAnything(Method):
    def penalty(self, client, step):
        return 0.1 * random.SystemRandom().random() * squares(step)


class SumsPadding(Method):
    """From a client's third round on, it adds up all rows of a batch, and so the padding of vectorized training."""

    def prepare_client_state(self, client):
        return client.method_state or {"rounds": torch.zeros(())}

    def penalty(self, client, step):
        return torch.where(client.method_state["rounds"] > 1.5, 0.01 * step.output.square().sum(), 0.0)

    def update_client_state(self, client, trained_state, data):
        return {"rounds": client.method_state["rounds"] + 1}


class Forgets(Method):
    """It keeps in itself what belongs in a client's memory."""

    _rounds = 0

    def update_client_state(self, client, trained_state, data):
        self._rounds += 1
        return {}

    def penalty(self, client, step):
        return 0.01 * self._rounds * squares(step)


class Meddles(Method):
    def prepare(self, trainer, pl_module):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(1.01)


class GivesOneToAll(Method):
    """It gives all clients one tensor to keep, and changes it afterwards."""

    _given = torch.zeros(1)

    def update_client_state(self, client, trained_state, data):
        self._given.add_(1)
        return {"mark": self._given}

    def penalty(self, client, step):
        return 0.001 * client.method_state["mark"].sum() * squares(step) if client.method_state else 0.0


class KeepsNaN(Method):
    def update_client_state(self, client, trained_state, data):
        return {"mark": torch.full((1,), torch.nan)}


class LeavesAHook(Method):
    def prepare(self, trainer, pl_module):
        pl_module.model.head.register_forward_hook(lambda *arguments: None)


OF_EVERY_METHOD = {
    "its draws come": DrawsAnything,
    "clients that train side by side": SumsPadding,
    "a fit that is stopped": Forgets,
    "who does not use it": Meddles,
    "what clients keep on disk": GivesOneToAll,
    "what clients and the server keep": KeepsNaN,
    "it leaves the module": LeavesAHook,
}


def with_more(kind):
    """A penalty that is always there."""

    class More(kind):
        def penalty(self, client, step):
            return super().penalty(client, step) + 0.01 * squares(step)

    return More


def twice(kind):
    class Twice(kind):
        def penalty(self, client, step):
            return 2 * super().penalty(client, step)

    return Twice


def idle(kind):
    class Idle(kind):
        def penalty(self, client, step):
            return 0.0

        def project_gradient(self, client, gradient, gradient_fn):
            return gradient

        def replay_samples(self, client):
            return None

    return Idle


def sends_its_head(kind):
    class SendsItsHead(kind):
        needs = dataclasses.replace(kind.needs, local_head=False)

    return SendsItsHead


def counts_one_client_twice(kind):
    class CountsOneClientTwice(kind):
        def upload_statistics(self, client, trained_state, data):
            factor = 2 if client.client_round.client_id == "0" else 1
            statistics = super().upload_statistics(client, trained_state, data)
            return {name: factor * value for name, value in statistics.items()}

    return CountsOneClientTwice


def weighs_by_batch(kind):
    class WeighsByBatch(kind):
        def readout_pairs(self, x, y):
            for states, wanted in super().readout_pairs(x, y):
                yield states * (1 + 0.001 * states.shape[1]), wanted

    return WeighsByBatch


def says_more(kind):
    class SaysMore(kind):
        def forward(self, x):
            return super().forward(x) + 0.001

    return SaysMore


def distils_at_once(kind):
    class DistilsAtOnce(kind):
        def penalty(self, client, step):
            return super().penalty(client, step) * (1.1 if self.proxy_server else 1.0)

    return DistilsAtOnce


MUTANTS = {
    "GLFC: in the first task": distils_at_once,
    "AFL": weighs_by_batch,
    "AnalyticFCL: of tasks": weighs_by_batch,
    "AnalyticFCL: what it says": says_more,
    "FedRAN": weighs_by_batch,
    "RanPAC": weighs_by_batch,
    "SI: a second task": idle,
    "FedProx: the penalty is": twice,
    "FedRep: heads never leave": sends_its_head,
    "EWC: a second task": idle,
    "MAS: a second task": idle,
    "LwF: the old model's answers": idle,
    "GEM: no step goes against": idle,
    "AGEM: no step goes against": idle,
    "Replay: with room for all": idle,
    "ReFed: with room for all": idle,
    "Fed3R: however": counts_one_client_twice,
}


def library(claim):
    return Plain if claim == "Method" else getattr(methods, claim, None) or type(claim, (RidgeClassifier,), {})


def mutant_of(statement):
    if statement.target == "Method":
        return next(kind for start, kind in OF_EVERY_METHOD.items() if statement.description.startswith(start))
    changes = [change for start, change in MUTANTS.items() if str(statement).startswith(start)]
    return (changes or [with_more])[0](library(statement.target))


def test_there_are_thirty_or_more_no_two_alike():
    assert len({str(one) for one in STATEMENTS}) == len(STATEMENTS) >= 30


@pytest.mark.seconds
@pytest.mark.parametrize("statement", STATEMENTS, ids=str)
def test_it_holds_and_fails_on_a_mutant(statement):
    statement.check(library(statement.target))
    with pytest.raises(AssertionError):
        statement.check(mutant_of(statement))


# One of each family: a term in the loss, a teacher, importances, replay, projection, variates, personal weights, sums.
IN_CI = ["FedProx", "FLwF2T", "EWC", "Replay", "AGEM", "SCAFFOLD", "FedRep", "Fed3R", "FedProto", "GLFC"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.long)
        for name in methods.__all__
        if name not in ("Client", "Method", "Needs", "Step")
    ],
)
def test_what_holds_of_every_method_holds_of_the_librarys(name):
    kind = getattr(methods, name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        return
    tried = 0
    for statement in get_statements(kind):
        try:
            statement.check(kind)
            tried += 1
        except NotApplicableError as reason:
            assert (
                "it refuses the trial" in str(reason)
                or "side by side" in str(reason)
                or "cannot be made" in str(reason)
            )
    assert tried or name in ("DyToxMethod", "FedWEIT", "IntrinsicPlasticity", "LVTMethod", "Unlearning")
