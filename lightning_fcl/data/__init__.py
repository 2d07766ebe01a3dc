"""Data of a federated stream: public datasets, scenarios, partitions, and the `FederatedStream` that combines them.

This package defines which client sees which data in which round. It contains no models, losses or local training.
"""
