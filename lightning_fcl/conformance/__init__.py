"""Statements about a method from its paper, checked on any implementation of the method.

This package contains no methods, and no statements about accuracies. A statement is an identity, or an inequality that
holds with a margin for several seeds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
