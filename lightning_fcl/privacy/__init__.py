"""Differential privacy: clipping and noise of uploads, the accounting of releases, and the ledger.

A *release* is a sum of uploads with noise that leaves the trusted server, or one noised upload that leaves a client.
"""
