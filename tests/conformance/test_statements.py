"""Tests that each conformance statement accepts a correct implementation and rejects a wrong implementation."""

import dataclasses
import random

import pytest
import torch

from lightning_fcl import RidgeClassifier, methods
from lightning_fcl.conformance import NotApplicableError, get_statements
from lightning_fcl.conformance.fixtures import STATEMENTS
from lightning_fcl.methods import Method

# `get_statements` imports the suite, which registers all statements.
get_statements(Method)


def squares(step):
    return sum(value.square().sum() for value in step.params.values())


class Plain(Method):
    """A method that overrides no hook, so that the training is FedAvg."""


class DrawsAnything(Method):
    def penalty(self, client, step):
        return 0.1 * random.SystemRandom().random() * squares(step)


class SumsPadding(Method):
    """A mutant: from a client's third round, the penalty includes the rows that pad a batch."""

    def prepare_client_state(self, client):
        return client.method_state or {"rounds": torch.zeros(())}

    def penalty(self, client, step):
        return torch.where(client.method_state["rounds"] > 1.5, 0.01 * step.output.square().sum(), 0.0)

    def update_client_state(self, client, trained_state, data):
        return {"rounds": client.method_state["rounds"] + 1}


class Forgets(Method):
    """A mutant: it counts the rounds in its own attribute instead of the client's method state."""

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
    """A mutant: all clients get the same tensor as method state, and the method changes this tensor later."""

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
    "random draws depend": DrawsAnything,
    "vectorized training": SumsPadding,
    "a fit that is interrupted": Forgets,
    "clients that do not use": Meddles,
    "client states on disk": GivesOneToAll,
    "the states of the clients": KeepsNaN,
    "the module is restored": LeavesAHook,
}


def with_more(kind):
    """Return a subclass with an additional penalty in every step."""

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


def keeps_its_variates(kind):
    class KeepsItsVariates(kind):
        of_experience = ()

    return KeepsItsVariates


def ignores_absent_clients(kind):
    class IgnoresAbsentClients(kind):
        def process_aggregate(self, server):
            return super().process_aggregate(dataclasses.replace(server, participation_rate=1.0))

    return IgnoresAbsentClients


def leaves_the_mean(kind):
    """Return a subclass whose server computes its state, but does not change the mean of the uploads."""

    class LeavesTheMean(kind):
        def process_aggregate(self, server):
            super().process_aggregate(server)
            return {}

    return LeavesTheMean


def ignores_the_server(kind):
    class IgnoresTheServer(kind):
        def extra_gradient(self, client, trained_state):
            return 0.0

    return IgnoresTheServer


def keeps_its_first_state(kind):
    class KeepsItsFirstState(kind):
        def update_client_state(self, client, trained_state, data):
            return client.method_state

    return KeepsItsFirstState


def needs_the_last_round(kind):
    """Return a subclass whose clients keep nothing of a task if they miss its last round (of three rounds)."""

    def missed(client):
        return client.client_round.round_idx % 3 != 2

    class NeedsTheLastRound(kind):
        def end_experience(self, client, trained_state, data):
            return client.method_state if missed(client) else super().end_experience(client, trained_state, data)

    class UpdatesInTheLastRound(kind):
        def update_client_state(self, client, trained_state, data):
            return client.method_state if missed(client) else super().update_client_state(client, trained_state, data)

    return UpdatesInTheLastRound if kind.__name__ == "LwF" else NeedsTheLastRound


def ignores_the_own_model(kind):
    """Return a subclass whose personal models start at the received model in each round."""

    class IgnoresTheOwnModel(kind):
        def prepare_client_state(self, client):
            client.method_state = {}
            return super().prepare_client_state(client)

    return IgnoresTheOwnModel


def contributes_one_client_twice(kind):
    class ContributesOneClientTwice(kind):
        def contribute_experience(self, client, trained_state, data):
            factor = 2 if client.client_round.client_id == "0" else 1
            contribution = super().contribute_experience(client, trained_state, data)
            return {name: factor * value for name, value in contribution.items()}

    return ContributesOneClientTwice


MUTANTS = {
    "SCAFFOLD: Algorithm 1": keeps_its_variates,
    "SCAFFOLD: in the first round of each task": keeps_its_variates,
    "FedDyn: the dynamic regularizer": ignores_absent_clients,
    "FedDyn: the first round": leaves_the_mean,
    "FedDyn: on clients with": leaves_the_mean,
    "FedNova: changes divided": leaves_the_mean,
    "Ditto: FedAvg, and personal": ignores_the_server,
    "MOON: the contrastive loss": keeps_its_first_state,
    "SI: the path integral": needs_the_last_round,
    "EWC: a client keeps": needs_the_last_round,
    "MAS: a client keeps": needs_the_last_round,
    "LwF: a client keeps": needs_the_last_round,
    "Replay: a client replays": needs_the_last_round,
    "RegMean: the least squares": leaves_the_mean,
    "APFL: with alpha fixed at 1": ignores_the_own_model,
    "APFL: with alpha fixed at 0": ignores_the_own_model,
    "FedNTD: the distillation": twice,
    "DERpp: alpha weights": twice,
    "CCVR: the calibrated head": contributes_one_client_twice,
    "FOT: with eps = 1": leaves_the_mean,
    "STSA-E": says_more,
    "GLFC: in the first task": distils_at_once,
    "AFL": weighs_by_batch,
    "AnalyticFCL: with tasks": weighs_by_batch,
    "AnalyticFCL: the outputs": says_more,
    "FedRAN": weighs_by_batch,
    "RanPAC": weighs_by_batch,
    "SI: a second task": idle,
    "FedProx: the penalty is": twice,
    "FedRep: heads are client-local": sends_its_head,
    "EWC: a second task": idle,
    "MAS: a second task": idle,
    "LwF: the probabilities": idle,
    "GEM: no step goes against": idle,
    "AGEM: no step goes against": idle,
    "Replay: if the buffer stores all": idle,
    "ReFed: if the buffer stores all": idle,
    "Fed3R: the classifier": counts_one_client_twice,
}


def library(claim):
    return Plain if claim == "Method" else getattr(methods, claim, None) or type(claim, (RidgeClassifier,), {})


def mutant_of(statement):
    if statement.target == "Method":
        return next(kind for start, kind in OF_EVERY_METHOD.items() if statement.description.startswith(start))
    changes = [change for start, change in MUTANTS.items() if str(statement).startswith(start)]
    return (changes or [with_more])[0](library(statement.target))


def test_statements_are_unique_and_at_least_thirty():
    assert len({str(one) for one in STATEMENTS}) == len(STATEMENTS) >= 30


@pytest.mark.seconds
@pytest.mark.parametrize("statement", STATEMENTS, ids=str)
def test_statement_holds_for_method_and_fails_on_mutant(statement):
    statement.check(library(statement.target))
    with pytest.raises(AssertionError):
        statement.check(mutant_of(statement))


# One method of each family: loss term, teacher, importance, replay, projection, control variates, personal weights,
# statistics, prototypes, and class-incremental federated learning.
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
def test_statements_hold_for_every_method_of_the_library(name):
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
                "the fit of the check raised" in str(reason)
                or "vectorized training" in str(reason)
                or "cannot be created" in str(reason)
            )
    assert tried or name in ("DyToxMethod", "FedWEIT", "IntrinsicPlasticity", "LVTMethod", "Unlearning")
