"""Networks of the papers whose methods this library implements. Each network is an ``nn.Module``.

A network is imported on first use of its name. The package ``tasks`` contains losses, training steps and Lightning
code. Networks do not define how their state is uploaded or downloaded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
