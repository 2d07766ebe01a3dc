"""Federated and continual learning methods: hooks that change losses, gradients, batches, uploads and aggregates.

The Trainer's strategy selects the clients of a round. Methods do not change this selection.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
