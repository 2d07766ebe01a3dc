"""Input and output: atomic writes, locks, paths, checksums, checks before reading, safe YAML, downloads, checkpoints.

What never belongs here: the content of data sets, weights or records.
"""
