"""Parts of recipes, and a recipe whose clients remember, over that of `conftest`."""


def strategy(**arguments):
    """One client at a time, as nodes train."""
    return {"class_path": "lightning_fcl.FederatedStrategy", "init_args": {"max_vectorized_clients": 1, **arguments}}


def method(name, **arguments):
    return {"class_path": f"lightning_fcl.callbacks.{name}", "init_args": arguments}


def classes(**arguments):
    """A class-incremental scenario."""
    return {"class_path": "ClassIncremental", "init_args": arguments}


REPLAY = {"trainer": {"callbacks": [method("Replay", memory_size=30), method("FLwF2T", alpha=0.2, beta=0.3)]}}
