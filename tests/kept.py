"""Functions that return the state that methods keep between fits in a plain Trainer."""


def memory_of(method):
    """Return the client state of a method."""
    return method.local.memory(method.section_name)


def entries_of(method):
    """Return the server state of a method."""
    return method.local.entries(method.section_name)
