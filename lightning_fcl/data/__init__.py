"""Data of a federated stream: public datasets, scenarios, partitions, and the `FederatedStream` that combines them.

This package defines which samples each client has in each round. It contains no models, losses or local training.
"""
