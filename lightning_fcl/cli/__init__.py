"""The command ``lightning-fcl``: one file a command; LightningCLI and jsonargparse do the parsing.

What never belongs here: anything that a run in Python would miss; a command calls what the rooms below offer.
"""
