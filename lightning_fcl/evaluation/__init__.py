"""Evaluation of runs: metrics of continual learning, communication in bytes and seconds, reports and figures.

The package reads the record of a run, which contains plain numbers. It uses neither modules nor Trainers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
