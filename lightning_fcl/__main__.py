"""Entry point of ``python -m lightning_fcl``, which runs the command ``lightning-fcl``."""

from lightning_fcl.cli.main import main

if __name__ == "__main__":
    main()
