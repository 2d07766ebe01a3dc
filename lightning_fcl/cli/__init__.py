"""The command ``lightning-fcl``, with one module per subcommand. LightningCLI and jsonargparse parse the recipes.

This package must contain only what a command line needs. Features that Python programs also use are in other packages.
"""
