"""What methods keep between the fits of a plain Trainer."""


def memory_of(method):
    """Return the client state of a method."""
    return method.local.memory(method.section_name)


def entries_of(method):
    """Return what the server keeps for a method."""
    return method.local.entries(method.section_name)
