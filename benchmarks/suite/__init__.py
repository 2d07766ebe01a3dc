"""The suite: workloads, engines, and what each measurement tells. `benchmarks/run.py` is its command."""
