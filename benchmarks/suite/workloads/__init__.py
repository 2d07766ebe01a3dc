"""Workloads by name. The small size of a workload is only for tests that all engines give the same result."""

from suite.workloads import digits, esn, har, vit

# For each workload: the function that creates it, its arguments, and the number of timed rounds after the first round.
WORKLOADS = {
    "digits-100": (digits.make, {"clients": 100}, 200),
    "digits-1000": (digits.make, {"clients": 1000}, 20),
    "digits-10000": (digits.make, {"clients": 10000}, 3),
    "har": (har.make, {}, 2),
    "har-uneven": (har.make, {"uneven": True}, 2),
    "esn": (esn.make, {}, 10),
    "vit": (vit.make, {}, 2),
    # Curves over the number of clients, of which 100 are sampled per round, and over the width of the model.
    **{f"drawn-{n}": (digits.make, {"clients": n, "clients_per_round": 100}, 20) for n in (1000, 10000, 100000)},
    **{f"width-{n}": (digits.make, {"clients": 100, "width": n}, 10) for n in (32, 128, 512, 2048)},
}

# Prefixes of the names of workloads that are points of a curve.
CURVES = ("drawn-", "width-")


def make(name, quick=False):
    """Return a new workload with the given name. With ``quick``, the workload is small."""
    maker, options, _ = WORKLOADS[name]
    return maker(quick=quick, **options)


def rounds_of(name, quick=False):
    """Return the number of timed rounds of a workload, without the warm-up round. With ``quick``, at most 2."""
    return min(2, WORKLOADS[name][2]) if quick else WORKLOADS[name][2]
