"""Recipes whose clients remember, over that of `conftest`."""

REPLAY = {
    "trainer": {
        "callbacks": [
            {"class_path": "lightning_fcl.callbacks.Replay", "init_args": {"max_size": 30}},
            {"class_path": "lightning_fcl.callbacks.FLwF2T", "init_args": {"alpha": 0.2, "beta": 0.3}},
        ]
    }
}
