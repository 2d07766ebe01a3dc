"""Local training: what trains one client, or several side by side, and what leaves each as if it were alone.

What never belongs here: rounds, the strategy, and what a server does.
"""
