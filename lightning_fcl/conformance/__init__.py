"""Statements that a method's paper makes, tried on anybody's implementation of it.

What never belongs here: methods, and accuracies; a statement is an identity, or holds on several seeds with a margin.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
