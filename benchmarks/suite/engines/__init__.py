"""Who trains.

Each module has a `NAME`, `refuses(workload)`, which tells why it cannot, and `run(workload, rounds, marks, out,
device)`, which leaves the server's last state in the file `out`.
"""
