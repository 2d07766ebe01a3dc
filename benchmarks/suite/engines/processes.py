"""The same loop in two processes, forked by hand: each trains half of the clients, sums lie in shared memory."""

import multiprocessing

import torch
from safetensors.torch import save_file

from suite.engines.loop import add, zeros

NAME = "loop, two processes"
PROCESSES = 2
PATIENCE = 600  # seconds that one waits for the other


def refuses(workload):
    """Why not."""
    return "clients are drawn" if workload.drawn else None


def _work(workload, server, sums, totals, number, barrier, rounds):
    """A process: its share of the clients, by samples, in each round."""
    torch.set_num_threads(1)
    share, loads = [[] for _ in range(PROCESSES)], [0] * PROCESSES
    for client in sorted(range(workload.clients), key=lambda c: -workload.sizes[c]):
        process_idx = loads.index(min(loads))
        share[process_idx].append(client)
        loads[process_idx] += workload.sizes[client]
    for _ in range(rounds):
        barrier.wait(PATIENCE)  # the server's state is there
        for value in sums.values():
            value.zero_()
        totals[number] = add(sums, workload, server, share[number])
        barrier.wait(PATIENCE)


def run(workload, rounds, marks, out, device="cpu"):
    """Fork, and bring the sums together."""
    if device != "cpu":
        raise ValueError("Expected the CPU for two forked processes: a GPU's state cannot be forked.")
    server = {name: value.share_memory_() for name, value in workload.initial().items()}
    sums = [{name: value.share_memory_() for name, value in zeros(server).items()} for _ in range(PROCESSES)]
    totals = torch.zeros(PROCESSES, dtype=torch.long).share_memory_()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES + 1)
    args = [(workload, server, sums[n], totals, n, barrier, rounds) for n in range(PROCESSES)]
    workers = [context.Process(target=_work, args=own, daemon=True) for own in args]
    for worker in workers:
        worker.start()
    marks.begin()
    for _ in range(rounds):
        barrier.wait(PATIENCE)
        barrier.wait(PATIENCE)
        total = int(totals.sum())
        mean = {name: sum(own[name] for own in sums) / total for name in server}
        for name, value in workload.end(server, mean, total).items():
            server[name].copy_(value)
        marks.round()
    for worker in workers:
        worker.join()
    save_file({name: value.clone() for name, value in server.items()}, out)
