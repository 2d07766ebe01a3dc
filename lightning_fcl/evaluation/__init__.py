"""What a run was worth: metrics of continual learning, bytes and seconds of communication, reports and figures.

What never belongs here: modules and Trainers; it reads the record that a run leaves, as plain numbers.
"""
