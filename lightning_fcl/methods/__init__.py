"""Algorithms against forgetting and for unlike clients: what each adds to a loss, a gradient, a batch or an upload.

What never belongs here: who trains when and how, Trainers and strategies; a method is functions of their arguments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
