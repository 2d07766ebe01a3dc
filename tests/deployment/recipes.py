"""Parts of recipes. Tests merge these parts into the recipe `BASE` of `conftest.py`."""


def strategy(**arguments):
    """Return the configuration of a strategy that trains one client at a time, as nodes do."""
    return {"class_path": "lightning_fcl.FederatedStrategy", "init_args": {"max_vectorized_clients": 1, **arguments}}


def method(name, **arguments):
    """Return the configuration of a method, which is a callback of the library."""
    return {"class_path": f"lightning_fcl.callbacks.{name}", "init_args": arguments}


def classes(**arguments):
    """Return the configuration of a class-incremental scenario."""
    return {"class_path": "ClassIncremental", "init_args": arguments}


REPLAY = {"trainer": {"callbacks": [method("Replay", memory_size=30), method("FLwF2T", alpha=0.2, beta=0.3)]}}
