"""Benchmark suite: workloads, engines and measurements. The command is `benchmarks/run.py`."""
