"""The zoo for `torch.hub.load`: each published network by its name, with dots as underscores."""

from functools import partial

dependencies = ["torch", "numpy", "safetensors", "lazy_loader", "lightning_fcl"]


def _entries():  # noqa: ANN202
    from lightning_fcl.zoo import list_models, load

    return {name.replace(".", "_"): partial(load, name) for name in list_models()}


globals().update(_entries())
