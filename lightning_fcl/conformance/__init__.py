"""Statements about methods, mostly from papers, and functions that check them on any implementation of a method.

A statement is an identity or an inequality. No statement is about accuracies. This package contains no methods.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
