"""Local training of one client, or of several clients in vectorized steps, without effects between clients.

Rounds, the strategy and the server are not part of this package.
"""
