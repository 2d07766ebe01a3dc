"""Deployment on edge devices: estimates of parameters, memory, time and energy, and export to files for runtimes.

This package has no code for training, and no code specific to the recipe of one paper. The main functions of this
package have a module as argument, and return numbers or write files.
"""
