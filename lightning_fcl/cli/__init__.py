"""The command ``lightning-fcl``: a file for each of its commands; LightningCLI and jsonargparse do the parsing.

What never belongs here: anything that a run in Python would miss; a command calls what the rooms below offer.
"""
