"""What a model needs on a device, and how it gets there: parameters, memory, time and energy; files for runtimes.

What never belongs here: training, or knowledge of one paper's recipe; modules go in, numbers and files come out.
"""
