"""Local training of one client, or of several clients in vectorized steps. Clients do not affect each other.

Rounds, the strategy and the server are not part of this package.
"""
