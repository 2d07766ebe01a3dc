"""The command ``lightning-fcl``, with one module per subcommand. LightningCLI and jsonargparse parse the recipes.

This package must contain only code that a command line needs. Other packages contain the features that Python programs
also use.
"""
