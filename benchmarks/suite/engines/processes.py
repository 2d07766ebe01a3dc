"""The hand-written loop in two forked processes with about equal loads. The sums are in shared memory."""

import multiprocessing

import torch
from safetensors.torch import save_file

from suite.engines.loop import add, zeros

NAME = "loop, two processes"
PROCESSES = 2
# Maximum time in seconds that a process waits at the barrier.
PATIENCE = 600


def refuses(workload):
    """Return the reason why the engine does not support the workload, or None if the engine supports it."""
    return "does not support client sampling" if workload.drawn else None


def _work(workload, server, sums, totals, number, barrier, rounds):
    """Train the clients of one process in each round. Both processes have about the same number of samples."""
    torch.set_num_threads(1)
    share, loads = [[] for _ in range(PROCESSES)], [0] * PROCESSES
    for client in sorted(range(workload.clients), key=lambda c: -workload.sizes[c]):
        process_idx = loads.index(min(loads))
        share[process_idx].append(client)
        loads[process_idx] += workload.sizes[client]
    for _ in range(rounds):
        # Wait until the server has written its state.
        barrier.wait(PATIENCE)
        for value in sums.values():
            value.zero_()
        totals[number] = add(sums, workload, server, share[number])
        barrier.wait(PATIENCE)


def run(workload, rounds, marks, out, device="cpu"):
    """Fork the processes, aggregate their sums and mark each round, and write the server's last state."""
    if device != "cpu":
        raise ValueError(
            f'Expected `device` to be "cpu", but got "{device}". A forked process cannot use a GPU. Use `--device cpu`.'
        )
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
