"""Whole trained things: networks that others have trained, checked, ready to predict and to go on learning.

What never belongs here: how anything is trained. Nothing here needs Lightning before `continue_from`, or to publish.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
