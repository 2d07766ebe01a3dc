"""Who sees which data when: public data sets as arrays, scenarios, partitions, and the stream that brings them together.

What never belongs here: models and losses, and what a client does with its data.
"""
