"""Final accuracy with the server's state from earlier experiences, and with a server that resets this state.

    python benchmarks/what_lasts.py

The script compares three kinds of state outside of methods: the moments of a server optimizer, the residuals of
compression, and stale updates in asynchronous rounds (from clients that started in an earlier experience). The data are
digits in 5 experiences of 4 rounds, on 6 clients with a Dirichlet partition (alpha 0.5). The method is `Replay(100)`.
The default seeds are 0, 1 and 2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, Replay
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.federation.client_speeds import ClientSpeeds
from lightning_fcl.federation.compression import TopK
from lightning_fcl.federation.fedbuff import BufferedServer, FedBuff
from lightning_fcl.models import MLP

EXPERIENCES, ROUNDS, SEEDS = 5, 4, (0, 1, 2)

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "moments of SGD(lr=1, momentum=0.9)": {"server_optimizer": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)},
    "moments of Adam(lr=0.01)": {"server_optimizer": lambda p: torch.optim.Adam(p, lr=0.01)},
    "residuals of TopK(0.01)": {"compression": TopK(0.01)},
    "stale updates of FedBuff": {"synchronization": FedBuff(ClientSpeeds(0.01, spread=1.0), 2)},
}


class StartAnew(L.Callback):
    """A callback that resets the server's state outside of methods at the end of each experience.

    The callback removes moments and residuals. If a client started before the current experience, its update becomes
    zero, or its uploaded model becomes the server's state.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        server = trainer.strategy.server
        if isinstance(server, BufferedServer):
            brought_up = server._brought_up

            def without_stale(name: str, value: Tensor, client: str, is_update: bool) -> Tensor:
                current_round = server._round()
                if (current_round - server._staleness.get(client, 0)) // ROUNDS < current_round // ROUNDS:
                    return torch.zeros_like(value) if is_update else server.state[name].clone()
                return brought_up(name, value, client, is_update)

            server._brought_up = without_stale

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        server = trainer.strategy.server
        if (trainer.current_epoch + 1) % ROUNDS:
            return
        server._server_optimizer, server._restored = None, {}
        for client in server.client_store:
            server.client_store[client] = {
                name: own for name, own in server.client_store[client].items() if name != "residual"
            }


def final_accuracy(seed: int, should_reset: bool, options: Mapping[str, Any]) -> float:
    L.seed_everything(seed, verbose=False)
    task = Classifier(MLP([64, 32, 10]), num_classes=10, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    metrics = ContinualMetrics()
    trainer = L.Trainer(
        strategy=FederatedStrategy(**options),
        max_epochs=EXPERIENCES * ROUNDS,
        callbacks=[Replay(memory_size=100), metrics, *[StartAnew()] * should_reset],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    scenario = ClassIncremental(EXPERIENCES, rounds_per_experience=ROUNDS)
    trainer.fit(task, datamodule=FederatedStream("digits", scenario, Dirichlet(6, 0.5), seed=seed))
    return sum(metrics.record["rounds"][-1]["correct"]["server"]) / sum(metrics.record["totals"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="set at least two seeds of the runs")
    seeds = parser.parse_args().seeds
    for name, options in SETTINGS.items():
        for should_reset in (False, True):
            accuracies = [final_accuracy(seed, should_reset, options) for seed in seeds]
            mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
            state = "reset" if should_reset else "kept"
            print(f"{name}: state {state}, final accuracy {mean:.3f} ± {spread:.3f}", flush=True)


if __name__ == "__main__":
    main()
