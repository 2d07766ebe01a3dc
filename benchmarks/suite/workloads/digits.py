"""Digits workload: each client has 15 of scikit-learn's digits in one full batch. The model is an MLP 64-width-10."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from lightning_fcl.models import MLP
from suite.workloads.gradient import Gradient


def make(clients, width=32, clients_per_round=None, quick=False):
    """Return the digits workload. With more than 119 clients, some clients have the same digits."""
    clients, clients_per_round = (12, clients_per_round and 4) if quick else (clients, clients_per_round)
    x, y = load_digits(return_X_y=True)
    sample_indices = np.resize(np.random.default_rng(0).permutation(len(y)), 15 * clients)
    x, y = torch.tensor(x / 16, dtype=torch.float32)[sample_indices], torch.tensor(y[sample_indices])
    torch.manual_seed(0)
    return Gradient(x, y, [15] * clients, MLP([64, width, 10]), 10, 15, clients_per_round)
