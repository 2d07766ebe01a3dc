"""Networks of the papers, each a plain ``nn.Module``, imported when its name is asked for.

What never belongs here: losses, training and anything of Lightning (that is a task), or how states travel.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
