"""Flower's simulation: an app with `FedAvg`, and clients in Ray actors with one processor each.

A client does the same work as in the hand-written loop. Flower transmits the arrays.
"""

import os
from functools import cache

import torch
from safetensors.torch import save_file

from suite import workloads

NAME = "Flower's simulation"
REQUIREMENTS = ["flwr[simulation]==1.41.*"]


def refuses(workload):
    """Return the reason why the engine does not support the workload, or None if the engine supports it."""
    return "does not support client sampling" if workload.drawn else None


@cache
def _workload(name, quick, device):
    """Return the workload with the given name. Each Ray actor creates the workload once."""
    torch.set_num_threads(1)
    workload = workloads.make(name, quick)
    return workload.to(device) if device != "cpu" else workload


def _client(name, quick, device):
    """Return the Flower app that trains the clients."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        workload = _workload(name, quick, device)
        server = {n: value.to(device) for n, value in message.content["arrays"].to_torch_state_dict().items()}
        state, weight = workload.local(server, int(context.node_config["partition-id"]))
        arrays = ArrayRecord({n: value.detach().cpu() for n, value in state.items()})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": weight})}), reply_to=message
        )

    return app


def run(workload, rounds, marks, out, device="cpu"):
    """Train with Flower's simulation, mark each round, and write the server's last state."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    class Server(FedAvg):
        """A FedAvg strategy that applies the workload's server update to the mean of the clients."""

        state = workload.initial()

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            total = sum(reply.content["metrics"]["num-examples"] for reply in replies if reply.has_content())
            arrays, metrics = super().aggregate_train(server_round, replies)
            self.state = workload.end(self.state, arrays.to_torch_state_dict(), total)
            return ArrayRecord(self.state), metrics

    # By default, the first round would use only the nodes that are already connected.
    node_counts = {"min_train_nodes": workload.clients, "min_available_nodes": workload.clients}
    strategy = Server(fraction_evaluate=0.0, **node_counts)
    server = ServerApp()

    @server.main()
    def main(grid, context):
        def tick(server_round, arrays):
            marks.round() if server_round else marks.begin()

        result = strategy.start(grid, ArrayRecord(strategy.state), num_rounds=rounds, evaluate_fn=tick)
        last = result.arrays.to_torch_state_dict()
        save_file({name: value.cpu().contiguous() for name, value in last.items()}, out)

    share = {"num_cpus": 1, "num_gpus": 0.5 if device == "cuda" else 0.0}
    client = _client(os.environ["SUITE_WORKLOAD"], bool(os.environ.get("SUITE_QUICK")), device)
    run_simulation(server, client, workload.clients, backend_config={"client_resources": share})
