"""Files come in, verified: where a file is from, its SHA-256, its licence, and the folder in which it is kept.

What never belongs here: what is in the files; it serves data sets and weights alike and knows neither.
"""
