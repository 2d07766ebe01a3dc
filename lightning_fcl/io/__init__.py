"""Input and output: atomic writes, locks, paths, checksums, checks before reading, safe YAML, downloads, checkpoints.

This package does not interpret the content of datasets, weights or records.
"""
