"""Deployment of a recipe on several machines with Flower.

Each node trains one client on its own data. On the server, a Lightning Trainer aggregates the uploads of the nodes.

Flower transmits the messages and starts the processes. Local training uses the same code as a simulation. Only
`messages`, `flower` and `node` call Flower.
"""
