"""ViT workload: a ViT with 6 layers and 2.7 M parameters, on 8 clients with 64 random images of 32 x 32 each."""

import torch

from lightning_fcl.models import ViT
from suite.workloads.gradient import Gradient


def make(quick=False):
    """Return the workload with random images, because the time does not depend on the values."""
    clients, images, options = (2, 4, {"width": 24, "depth": 2, "num_heads": 2}) if quick else (8, 64, {"depth": 6})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * images, 3, 32, 32, generator=generator)
    y = torch.randint(10, (clients * images,), generator=generator)
    torch.manual_seed(0)
    return Gradient(x, y, [images] * clients, ViT(num_classes=10, **options), 10, 32)
