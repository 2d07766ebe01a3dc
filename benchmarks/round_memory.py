"""Peak memory of rounds of a large model, relative to the size of the model.

    python benchmarks/round_memory.py --clients 16 --reduction mean

The model is a ResNet-50 with 25.6 million parameters. Clients train sequentially with SGD, each on four images of
32 x 32. The server aggregates with a mean or another reduction. The result is the peak memory of three rounds: the
module, and all memory that the process uses in addition during the fit. The script reads the memory from
`/proc`, so it runs only on Linux. The memory of other programs on the machine is not included.
"""

import argparse
import logging
import pathlib
import re
import warnings

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet50

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split


class Module(L.LightningModule):
    """A plain LightningModule that trains a network with SGD."""

    def __init__(self, network):
        super().__init__()
        self.net = network

    def training_step(self, batch, batch_idx):
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the SGD optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def in_use(field):
    """Return bytes of this process: the current memory (``VmRSS``), or the peak since the last reset (``VmHWM``)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


def fit(network, clients, reduction):
    """Train a network for three rounds. Each client has four random images and trains sequentially."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4 * clients, 3, 32, 32, generator=generator), torch.arange(4 * clients) % 4
    options = {"scenario": ClassIncremental(1, rounds_per_experience=3), "split": Split(test=0.0), "seed": 0}
    stream = FederatedStream.from_arrays(x, y, np.arange(len(y)) // 4, batch_size=4, **options)
    strategy = FederatedStrategy(seed=0, max_vectorized_clients=1, reductions={"*": reduction})
    L.Trainer(
        strategy=strategy, max_epochs=3, logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(network), datamodule=stream)  # fmt: skip


def main():
    """Measure and print the peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--reduction", default="mean")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # At their first use, libraries load modules that take memory. This small fit loads them before the measurement.
    fit(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), 2, "mean")
    network = resnet50()
    size, initial_memory = sum(value.nbytes for value in network.state_dict().values()), in_use("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    fit(network, options.clients, options.reduction)
    ratio = 1 + (in_use("VmHWM") - initial_memory) / size
    print(
        f"{options.reduction} of {options.clients} clients: peak memory is {ratio:.1f} times "
        f"the model's {size / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
