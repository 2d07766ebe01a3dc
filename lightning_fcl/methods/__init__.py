"""Federated and continual learning methods: hooks that change losses, gradients, batches, uploads and aggregates.

Strategies and Trainers, not methods, choose which clients train and how they train.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
