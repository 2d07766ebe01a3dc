"""HAR workload: the HAR-CNN 196-16C_4M_1024D with 5.6 M parameters, on 20 clients.

By default, each client has 600 random windows in the shape of UCI HAR's windows.
"""

import torch

from lightning_fcl.models import HARCNN
from suite.workloads.gradient import Gradient


def make(uneven=False, quick=False):
    """Return the workload with random windows, because the time does not depend on the values.

    With ``uneven``, every second client has a tenth of the windows.
    """
    clients, windows = (4, 40) if quick else (20, 600)
    sizes = [windows // 10 if uneven and client % 2 else windows for client in range(clients)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 6, 128, generator=generator)
    y = torch.randint(6, (sum(sizes),), generator=generator)
    torch.manual_seed(0)
    model = HARCNN("8-16C_4M_16D" if quick else "196-16C_4M_1024D", dropout=0.0)
    return Gradient(x, y, sizes, model, 6, 32)
