"""What is trained: by name, at full size or at one that only shows that all engines do the same."""

from suite.workloads import digits, esn, har, vit

# name -> what makes it, and how many rounds are timed after the first
WORKLOADS = {
    "digits-100": (digits.make, {"clients": 100}, 200),
    "digits-1000": (digits.make, {"clients": 1000}, 20),
    "digits-10000": (digits.make, {"clients": 10000}, 3),
    "har": (har.make, {}, 2),
    "har-uneven": (har.make, {"uneven": True}, 2),
    "esn": (esn.make, {}, 10),
    "vit": (vit.make, {}, 2),
    # Curves: with the number of clients of whom 100 are drawn, and with the size of the model.
    **{f"drawn-{n}": (digits.make, {"clients": n, "clients_per_round": 100}, 20) for n in (1000, 10000, 100000)},
    **{f"width-{n}": (digits.make, {"clients": 100, "width": n}, 10) for n in (32, 128, 512, 2048)},
}

CURVES = ("drawn-", "width-")  # how their names begin


def make(name, quick=False):
    """A workload."""
    maker, options, _ = WORKLOADS[name]
    return maker(quick=quick, **options)


def rounds_of(name, quick=False):
    """How many rounds are timed after the first, which warms up."""
    return min(2, WORKLOADS[name][2]) if quick else WORKLOADS[name][2]
