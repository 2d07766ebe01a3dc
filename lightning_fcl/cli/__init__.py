"""The command ``lightning-fcl`` and its subcommands. LightningCLI and jsonargparse parse the recipes.

This package must contain only code that a command line needs. Other packages contain the features that Python programs
also use.
"""
