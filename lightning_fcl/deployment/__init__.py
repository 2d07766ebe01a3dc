"""Deployment of a recipe on several machines with Flower.

Each node trains one client on its own data. On the server, a Lightning Trainer aggregates the uploads of the nodes.

This package contains no sockets, no schedulers and no local training. Only `messages`, `flower` and `node` call Flower.
"""
