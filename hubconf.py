"""Entry points of `torch.hub.load`: one for each network of the zoo, with underscores in place of dots in its name."""

from functools import partial

dependencies = ["torch", "numpy", "safetensors", "lazy_loader", "lightning_fcl"]


def _entries():  # noqa: ANN202
    from lightning_fcl.zoo import list_models, load

    return {name.replace(".", "_"): partial(load, name) for name in list_models()}


globals().update(_entries())
