"""Federated and continual learning methods: hooks that change losses, gradients, batches, uploads and aggregates.

Methods do not select the clients of a round. The Trainer's strategy selects them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
