"""A recipe across machines: a node trains one client on its own data, a Trainer takes its rounds from nodes; Flower.

What never belongs here: sockets, schedulers, or how clients train. Only `messages`, `flower` and `node` call Flower.
"""
