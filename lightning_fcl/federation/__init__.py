"""What a server does: how uploads become the next state, how they are coded, who takes part, what clients keep.

What never belongs here: Trainers, and classes of modules; it knows states, entries of tensors by name.
"""
