"""Engines: the implementations of federated training that the suite compares.

Each module defines:

- `NAME`: the name of the engine in tables,
- `refuses(workload)`: returns the reason why the engine does not support the workload, or None,
- `run(workload, rounds, marks, out, device)`: trains, marks each round, and writes the server's last state to `out`.
"""
