"""Tests of the ranges of the methods' arguments: values outside of a range raise an error."""

from math import inf, nan

import pytest
from raising import raises

from lightning_fcl import callbacks
from lightning_fcl.errors import InvalidValueError, UnknownNameError

WRONG = {
    "AGEM": {"memory_size": 1.5, "batch_size": 0},
    "APFL": {"alpha0": 1.5, "alpha_lr": -1},
    "BCN": {
        "beta": -1.0,
        "eps": nan,
        "x_steps": -1,
        "theta_steps": -1,
        "inner_lr": 0.0,
        "batch_size": 0,
        "memory_size": 1.5,
    },
    "CCVR": {"covariance": "none", "num_samples": 0, "epochs": 0, "lr": 0.0, "logit_norm": 0.0},
    "DERpp": {"memory_size": 0, "alpha": -1.0, "batch_size": 0},
    "DyToxMethod": {
        "memory_size": -1,
        "distillation_weight": "no",
        "temperature": 0.0,
        "divergence_weight": -0.1,
        "balanced_epochs": -1,
    },
    "Ditto": {"strength": -0.1},
    "EWC": {"strength": -1, "decay": 1.5},
    "FedDyn": {"alpha": -0.1},
    "FLwF": {"alpha": -0.1, "temperature": 0.0},
    "FLwF2T": {"alpha": 1.1, "temperature": 0.0, "reduction": "samples", "teacher": "dead"},
    "FOT": {"eps": 0.0},
    "Fed3R": {"beta": -1.0, "temperature": 0},
    "FedCBDR": {"memory_size": 0, "old_temperature": 0, "new_temperature": 0, "old_weight": -1, "new_weight": -1},
    "FedKNOW": {"temperature": 0, "tune_epochs": -1, "rho": 2},
    "FedNTD": {"beta": -1.0, "temperature": 0.0},
    "FedProto": {"predictor": "heat"},
    "FedProx": {"mu": -0.1},
    "FedRep": {"head_epochs": 0},
    "FedViT": {"rho": 0, "distance": "euclid", "k": 0, "margin": -0.1, "integration_epochs": -1},
    "FedWEIT": {"l1": -1.0, "l2": -1.0, "mask_l1": -2.0, "weight_decay": nan, "sparsity": 1.0, "kb_size": -1},
    "GLFC": {"strength": 1.5, "num_iterations": 0},
    "GEM": {"margin": -1.0, "memory_size": 0},
    "ICaRL": {"memory_size": 0},
    "IntrinsicPlasticity": {"sigma": 0.0, "eta": nan, "min_gain": 0.0, "mu": inf, "local_epochs": 0},
    "LVTMethod": {"gamma": -1.0, "alpha": nan, "beta": -0.5, "rho": 0.0, "temperature": 0.0, "batch_size": 0},
    "LogitAdjustment": {"tau": -1},
    "LwF": {"strength": -1, "temperature": 0.0},
    "MAS": {"strength": -1, "decay": 1.5},
    "MFCL": {
        "distillation_weight": -0.1,
        "finetune_weight": -1.0,
        "num_samples": 0,
        "batch_size": 1,
        "num_steps": 0,
        "lr": 0.0,
        "noise_dim": 0,
        "width": 0,
        "statistics_weight": -1.0,
        "entropy_weight": -1.0,
        "smoothness_weight": -0.1,
    },
    "MOON": {"mu": -1.0, "temperature": 0.0},
    "MeanOutputLoss": {"mu": -0.1, "output_kind": "softmax", "distance": "cosine", "cross_entropy": "new"},
    "ReFed": {"memory_size": 0, "num_iterations": 0, "lr": 0.0, "strength": -0.5},
    "RegMean": {"alpha": 1.5},
    "Replay": {"memory_size": 0.0, "policy": "best", "update": "never"},
    "SI": {"strength": -1, "decay": 1.5, "damping": 0.0},
    "TARGET": {
        "distillation_weight": -1.0,
        "num_images": -1,
        "batch_size": 1,
        "num_steps": 0,
        "width": 0,
        "statistics_weight": -1.0,
        "temperature": 0.0,
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, *pair) for kind, wrong in WRONG.items() for pair in wrong.items()]
)
def test_method_argument_out_of_range_raises(kind, name, value):
    # `distillation_weight` accepts a number or "auto". Another string is an invalid value, not an unknown name.
    is_name = isinstance(value, str) and name != "distillation_weight"
    with raises(UnknownNameError if is_name else InvalidValueError, name, value=value):
        getattr(callbacks, kind)(**{name: value})
