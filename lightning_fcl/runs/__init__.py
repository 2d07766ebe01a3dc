"""Runs of recipes: recipes are read, checked and trained, and results are written to the run's folder.

Commands, and programs that start several runs, are in `lightning_fcl.cli`.
"""
