"""Hand-written loop: one process trains the clients sequentially."""

import torch
from safetensors.torch import save_file

NAME = "loop"


def refuses(workload):
    """Return None, because the engine supports every workload."""
    return None


def zeros(state):
    """Return a state of zeros with the names and shapes of ``state``."""
    return {name: torch.zeros_like(value) for name, value in state.items()}


def add(sums, workload, server, clients):
    """Train some clients, add their weighted states to ``sums`` in place, and return the sum of their weights."""
    total = 0
    for client in clients:
        state, weight = workload.local(server, client)
        for name, value in state.items():
            sums[name].add_(value, alpha=weight)
        total += weight
    return total


def run(workload, rounds, marks, out, device="cpu"):
    """Train with the loop, mark each round, and write the server's last state."""
    if device != "cpu":
        workload.to(device)
    server, generator = workload.initial(), torch.Generator().manual_seed(0)
    marks.begin()
    for _ in range(rounds):
        clients = range(workload.clients)
        if workload.drawn:
            clients = torch.randperm(workload.clients, generator=generator)[: workload.drawn].tolist()
        sums = zeros(server)
        total = add(sums, workload, server, clients)
        server = workload.end(server, {name: value / total for name, value in sums.items()}, total)
        marks.round()
    save_file({name: value.cpu().contiguous() for name, value in server.items()}, out)
