"""Evaluation of runs: metrics of continual learning, communication in bytes and seconds, reports and figures.

The package reads the record of a run, which contains plain numbers. It uses neither modules nor Trainers.
"""
