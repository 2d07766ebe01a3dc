"""Runs of recipes: recipes are read, checked and trained, and results are written to the run's folder.

This package contains no command-line code except the subclasses of LightningCLI. Commands, and programs that start
several runs, are in `lightning_fcl.cli`.
"""
