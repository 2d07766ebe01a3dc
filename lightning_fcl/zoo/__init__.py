"""Zoo of published networks. All files are verified. The networks can predict, and some can continue learning.

This package contains no training code. Only `continue_from`, `publish` and `verify` import Lightning.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
