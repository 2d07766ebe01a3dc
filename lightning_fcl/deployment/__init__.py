"""A recipe across machines: the same local training and the same server, with messages between them.

A node trains with `lightning_fcl.simulation`, for one client, on data of its own; the server is a Trainer whose rounds
come from nodes. `lightning_fcl.deployment.flower` is the only module that knows Flower.

What never belongs here: sockets, schedulers, or how clients train.
"""
