"""Zoo of published networks: pretrained weights that are verified, predict, and can continue learning.

This package contains no training code. Only `continue_from` and `publish` import Lightning.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
