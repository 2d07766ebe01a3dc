"""Runs of recipes: this package reads and checks recipes, trains models, and writes results to a run's folder.

Commands, and programs that start several runs, are in `lightning_fcl.cli`.
"""
