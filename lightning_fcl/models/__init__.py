"""Networks of the papers. Each network is a plain ``nn.Module`` and is imported on first use of its name.

Losses, training and Lightning code belong to tasks. Networks do not define how their state is uploaded or downloaded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
