"""Who sees which data when: public data sets as arrays, scenarios, partitions, and the stream that joins them.

What never belongs here: models and losses, and what a client does with its data.
"""
