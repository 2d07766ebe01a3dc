"""Tests that exact sums equal sums of fractions, for any order, grouping, processes, threads and instruction set."""

import hashlib
import math
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from threading import Barrier

import pytest
import torch
from raising import raises

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import BUILT_IN_REDUCTIONS, Aggregator
from lightning_fcl.federation.exact_sum import ExactSum, weighted_sum
from lightning_fcl.federation.fixed_point import CHUNK_SIZE, ExactWeights
from lightning_fcl.federation.reductions import Mean, Sum
from lightning_fcl.federation.robust import Krum, TrimmedMean

pytestmark = pytest.mark.rounding


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(clients=12, numbers=10, dtype=torch.float64):
    return torch.randn(clients, numbers, generator=generator(), dtype=dtype)


VALUES = {
    "single": lambda: normal(dtype=torch.float32),
    "double": normal,
    "half": lambda: normal().half(),
    "bfloat16": lambda: normal().bfloat16(),
    "complex": lambda: torch.complex(normal(), normal().flip(0)),
    "one number": lambda: normal(40, 1, torch.float32),
    "cancelling": lambda: torch.cat([normal(), -normal() * (1 + 2.0**-40)]),
    "mixed magnitudes": lambda: normal(dtype=torch.float32) * torch.logspace(-30, 30, 10),
    "mixed magnitudes, double": lambda: normal() * torch.logspace(-100, 100, 10, dtype=torch.float64),
    "clients of unlike magnitudes": lambda: normal() * torch.logspace(-100, 100, 12, dtype=torch.float64)[:, None],
    "subnormal": lambda: normal() * 2.0**-1060,
    "subnormal, single": lambda: (normal() * 2.0**-140).float(),
    "huge": lambda: normal() * 2.0**870,
    "huge, single": lambda: normal(dtype=torch.float32).clamp(-3, 3) * 1e38,
    "zeros": lambda: normal() * (torch.rand(12, 10, generator=generator(1)) < 0.1),
    "nothing but zeros": lambda: torch.zeros(12, 10) * -1.0,
    "whole": lambda: (normal() * 1000).round(),
    "integers": lambda: (normal() * 2**50).long() * 2**8 + 1,
}
WEIGHTS = {
    "no weights": None,
    "whole": [float(1 + 37 * i % 600) for i in range(40)],
    "large": [float(2**20 + 12345 * i) for i in range(40)],
    "fractions": [0.1 * (i + 1) for i in range(40)],
    "unlike": [3.0**i / 1e6 for i in range(40)],
}


def bits(tensor):
    """Return a digest of a tensor's bytes. Bitwise identical tensors (with equal signs of zeros) have equal digests."""
    return hashlib.sha256(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def summed(values, weights, order=None, together=1):
    """Return the sum of clients' values in the given order. ``together`` is the number of clients per call of `add`."""
    exact, order = ExactSum(values[0]), list(range(len(values)) if order is None else order)
    for start in range(0, len(order), together):
        rows = order[start : start + together]
        exact.add(values[rows], None if weights is None else ExactWeights([weights[row] for row in rows]))
    return exact


def by_hand(values, weights):
    """Return the exact sum of double-precision products, computed with fractions. Only the result is rounded."""
    if values.is_complex():
        return torch.complex(by_hand(values.real, weights), by_hand(values.imag, weights))
    columns = []
    for column in values.flatten(1).T.tolist():
        products = column if weights is None else [w * v for w, v in zip(weights, column, strict=False)]
        columns.append(float(sum(map(Fraction, products))))
    return torch.tensor(columns, dtype=torch.float64).view(values.shape[1:])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", VALUES)
def test_exact_sum_any_order_and_grouping_is_bitwise_identical(kind, weights):
    values, weights = VALUES[kind](), WEIGHTS[weights]
    n, expected = len(values), bits(summed(values, weights).total())
    for seed in range(3):
        order = torch.randperm(n, generator=generator(seed)).tolist()
        assert bits(summed(values, weights, order).total()) == expected
        assert bits(summed(values, weights, order, together=[7, n, 3][seed]).total()) == expected
    for order in (sorted(range(n), key=lambda i: float(values[i].abs().sum())), range(n - 1, -1, -1)):
        assert bits(summed(values, weights, order).total()) == expected
    for ranks in (1, 2, 3):
        parts = [summed(values, weights, range(rank, n, ranks), together=1 + rank) for rank in range(ranks)]
        merged = ExactSum(values[0])
        for part in reversed(parts):
            merged.add_digits(part.digits())
        assert bits(merged.total()) == expected
        # Add the digits in the same way as an all-reduce.
        digits = {}
        for part in parts:
            for exponent, digit in part.digits().items():
                digits[exponent] = digits.get(exponent, 0) + digit
        reduced = ExactSum(values[0])
        reduced.add_digits(digits)
        assert bits(reduced.total()) == expected
        assert {e: d.tolist() for e, d in reduced.digits().items() if d.any()} == {
            e: d.tolist() for e, d in merged.digits().items() if d.any()
        }


@pytest.mark.seconds
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", [kind for kind in VALUES if kind != "integers"])
def test_exact_sum_equals_sum_of_fractions(kind, weights):
    values, weights = VALUES[kind](), WEIGHTS[weights]
    total, expected = summed(values, weights).total(), by_hand(values, weights)
    if values.dtype not in (torch.float64, torch.complex128) and "mixed" not in kind and weights != WEIGHTS["unlike"]:
        assert torch.equal(total, expected)
    # The rounded results can differ if the exact sum is almost halfway between two double-precision numbers.
    torch.testing.assert_close(total, expected, rtol=2.0**-52, atol=0)


@pytest.mark.seconds
def test_exact_sum_of_100000_uploads_equals_fsum():
    values = torch.randn(100_000, 3, generator=generator()) * torch.tensor([1e-8, 1.0, 1e8])
    weights = [float(1 + i % 977) for i in range(len(values))]
    expected = [math.fsum(w * v for w, v in zip(weights, column, strict=True)) for column in values.T.tolist()]
    order = torch.randperm(len(values), generator=generator(1)).tolist()
    assert summed(values, weights, together=1000).total().tolist() == expected
    assert summed(values, weights, order, together=333).total().tolist() == expected
    assert summed(values[:3000], weights, range(2999, -1, -1)).total().tolist() == [
        math.fsum(w * v for w, v in zip(weights, column, strict=False)) for column in values[:3000].T.tolist()
    ]


@pytest.mark.seconds
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("weight", "uploads"), [(65535.0, 700), (1.0, 9000), (2.0**28 + 1, 200)])
def test_exact_sum_full_limbs_are_carried(sign, weight, uploads):
    value = torch.tensor([[sign * (2.0 - 2.0**-23), sign * 2.0**-40, sign * 1.9999998]])
    exact = ExactSum(value[0])
    for _ in range(uploads):
        exact.add(value, ExactWeights([weight]))
    assert exact.total().tolist() == [float(Fraction(v) * int(weight) * uploads) for v in value[0].tolist()]
    together = ExactSum(value[0])
    together.add(value.expand(uploads, 3), ExactWeights([weight] * uploads))
    assert bits(together.total()) == bits(exact.total())
    half = ExactSum(value[0])
    half.add(-value.expand(uploads // 2, 3), ExactWeights([weight] * (uploads // 2)))
    half.add_digits(exact.digits())
    left = uploads - uploads // 2
    assert half.total().tolist() == [float(Fraction(v) * int(weight) * left) for v in value[0].tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_sum_several_chunks_equals_sums_of_slices(dtype):
    size = 2 * CHUNK_SIZE + 5
    values = torch.randn(3, size, generator=generator(), dtype=dtype) * 0.02
    values[1, CHUNK_SIZE : 2 * CHUNK_SIZE] = 0
    values[2, 0] = 1e20
    weights = [600.0, 20.0, 7.0]
    whole = summed(values, weights)
    for part in (slice(0, 10), slice(CHUNK_SIZE - 5, CHUNK_SIZE + 5), slice(size - 9, size)):
        assert torch.equal(whole.total()[part], summed(values[:, part], weights, together=3).total())
    assert torch.equal(summed(values, weights, [2, 0, 1], together=2).total(), whole.total())
    assert torch.equal(summed(values.view(3, 1, -1).mT, weights).total()[:, 0], whole.total())
    merged = summed(values, weights, [1])
    merged.add_digits(summed(values, weights, [2, 0]).digits())
    assert torch.equal(merged.total(), whole.total())


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (2, 3, 4)])
def test_exact_sum_any_shape_and_dtype(shape):
    values = torch.randn(5, *shape, generator=generator())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
        rows = values.abs().mul(9).to(dtype)
        for together in (1, 5):
            total = summed(rows, None, together=together).total(dtype)
            assert total.dtype == dtype and total.shape == shape
            expected = rows.any(dim=0) if dtype is torch.bool else rows.double().sum(dim=0).to(dtype)
            assert torch.equal(total, expected)


def test_exact_sum_large_integers_are_exact():
    values = torch.tensor([[2**62, 5, -(2**62)], [2**62 - 1, -(2**60) - 1, -(2**62)], [0, 2**60, 0]])
    for order in ([0, 1, 2], [2, 1, 0]):
        assert summed(values, None, order).total(torch.int64).tolist()[1:] == [4, -(2**63)]
    aggregator = Aggregator({"n": Sum()})
    for counter in (2**61 + 1, 2**60 + 3, 5):
        add(aggregator, torch.tensor(counter), "n")
    assert aggregator.compute({"n": torch.tensor(7)})["n"].item() == 2**61 + 2**60 + 16


def test_exact_sum_can_add_after_total():
    values = normal()
    exact = summed(values[:10], None)
    first, digits = exact.total(), exact.digits()
    assert torch.equal(exact.total(), first) and digits.keys() == exact.digits().keys()
    exact.add(values[10:])
    assert torch.equal(exact.total(), summed(values, None).total())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_aggregate_non_finite_or_huge_upload_raises_with_entry(wrong):
    values = torch.ones(2, 3, dtype=torch.float64)
    values[1, 2] = wrong
    for uploads in (values, values[1:]):
        aggregator = Aggregator({"head.w": Mean()})
        with raises(InvalidValueError, "head.w"):
            aggregator.accumulate({"head.w": uploads}, [2.0] * len(uploads), range(len(uploads)))
            aggregator.compute({"head.w": torch.zeros(3, dtype=torch.float64)})


@pytest.mark.parametrize("row", [torch.zeros(10), -torch.zeros(10), normal(1)[0], torch.arange(10)], ids=str)
def test_accumulator_expanded_rows_equal_copied_rows(row):
    server, results = {"a": torch.zeros_like(row)}, []
    for rows in (row.expand(5, 10), row.repeat(5, 1)):
        accumulator = Sum().make_accumulator()
        accumulator.update({"a": rows}, [1.0] * 5)
        accumulator.update({"a": normal(2).to(row.dtype)}, [1.0] * 2)
        results.append(accumulator.compute(server)["a"])
    assert torch.equal(*results) and bool(results[0].any())


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(60000.0, dtype=torch.float16),
        torch.tensor(3e38),
        torch.tensor(2**62),
        torch.tensor(-(2**62) - 1),
        torch.tensor(200, dtype=torch.uint8),
        torch.tensor(2e38 + 3e38j),
    ],
)
def test_sum_outside_dtype_range_raises_with_entry(value):
    aggregator = Aggregator({"w": Sum()})
    add(aggregator, value)
    add(aggregator, value)
    with raises(InvalidValueError, "w"):
        aggregator.compute({"w": torch.zeros_like(value)})
    if value.dtype is not torch.uint8:
        add(aggregator, -value)
        assert aggregator.compute({"w": torch.zeros_like(value)})["w"] == value


def add(aggregator, value, entry="w"):
    aggregator.accumulate({entry: value[None]}, [1.0], [aggregator.num_uploads])


def uploads_of(clients, seed=0):
    g = generator(seed)
    values = {
        "weight": torch.randn(clients, 40, 5, generator=g) * torch.logspace(-6, 1, 5),
        "A": torch.randn(clients, 6, 6, generator=g, dtype=torch.float64),
        "n": torch.randint(0, 1000, (clients,), generator=g),
    }
    values["weight"][1, 3] = 0
    return values, [float(w) for w in torch.randint(1, 700, (clients,), generator=g).tolist()]


@pytest.mark.parametrize("reduction", ["mean", "sparse_mean", "sum", "median", "trimmed_mean", "krum"])
def test_reductions_any_order_and_grouping_is_bitwise_identical(reduction):
    values, weights = uploads_of(9)
    # Two clients upload equal weights. Zeros with different signs test the median.
    values["weight"][4] = values["weight"][7]
    values["weight"][:, 0, 0] = torch.tensor([0.0, -0.0] * 4 + [0.0])
    server = {name: value[0] * 3 for name, value in values.items()}
    results = set()
    for seed in range(6):
        order = torch.randperm(9, generator=generator(seed)).tolist() if seed else list(range(9))
        rule = {"trimmed_mean": TrimmedMean(0.2), "krum": Krum(1)}.get(reduction, BUILT_IN_REDUCTIONS[reduction])
        aggregator = Aggregator(dict.fromkeys(values, rule))
        size = [9, 1, 4][seed % 3]
        for start in range(0, 9, size):
            rows = order[start : start + size]
            part = {name: value[rows] for name, value in values.items()}
            aggregator.accumulate(part, [weights[row] for row in rows], client_indices=rows)
        results.add(tuple(bits(value) for value in aggregator.compute(server).values()))
    assert len(results) == 1


def test_krum_equal_scores_selects_lowest_client_index():
    # Each of the first two uploads is the nearest neighbor of the other.
    values = torch.tensor([[0.0], [1.0], [5.0], [9.0]])
    for order, together in (([0, 1, 2, 3], 4), ([3, 1, 2, 0], 1), ([1, 0, 3, 2], 1), ([1, 3, 2, 0], 2)):
        aggregator = Aggregator({"w": Krum(1)})
        for rows in (order[start : start + together] for start in range(0, 4, together)):
            aggregator.accumulate({"w": values[rows]}, [1.0] * together, client_indices=[10 * row for row in rows])
        for _ in range(2):
            assert aggregator.compute({"w": values[0]})["w"].item() == 0.0


class Said:
    """A store for the values that ranks exchange. Each rank is a thread."""

    def __init__(self, number):
        self.number, self.values, self.met = number, [None] * number, Barrier(number)


class Rank:
    """A rank that runs in a thread."""

    def __init__(self, said, rank):
        self.said, self.rank, self.num_ranks = said, rank, said.number

    def all_gather_object(self, value):
        self.said.values[self.rank] = value
        self.said.met.wait()
        values = list(self.said.values)
        self.said.met.wait()
        return values

    def all_reduce(self, numbers):
        numbers.copy_(sum(self.all_gather_object(numbers.clone())))


def ranks_of(number):
    said = Said(number)
    return [Rank(said, rank) for rank in range(number)]


@pytest.mark.parametrize("reduction", ["mean", "sparse_mean", "sum", "median"])
def test_accumulator_sync_equals_single_process(reduction):
    values, weights = uploads_of(8)
    server = {name: value[0] for name, value in values.items()}
    results = []
    for ranks in (1, 2, 3):
        parts = [BUILT_IN_REDUCTIONS[reduction].make_accumulator() for _ in range(ranks)]
        for rank, part in enumerate(parts):
            rows = range(8)[rank * 8 // ranks : (rank + 1) * 8 // ranks]
            part.update({name: value[list(rows)] for name, value in values.items()}, [weights[row] for row in rows])
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(lambda part, rank: part.sync(rank), parts, ranks_of(ranks)))
        results += [[bits(value) for value in part.compute(server).values()] for part in parts]
    assert all(result == results[0] for result in results)


def test_mean_equals_rounded_fsum():
    values, weights = uploads_of(50)
    for rows in (values["weight"], values["A"]):
        accumulator = Mean().make_accumulator()
        accumulator.update({"w": rows}, weights)
        result = accumulator.compute({"w": rows[0]})["w"]
        columns = rows.flatten(1).T.double().tolist()
        exact = [math.fsum(w * v for w, v in zip(weights, column, strict=True)) / sum(weights) for column in columns]
        expected = torch.tensor(exact, dtype=torch.float64).view(rows.shape[1:])
        assert torch.equal(result, expected.to(rows.dtype))


def test_group_sums_mean_is_close_and_other_reductions_are_equal():
    values, weights = uploads_of(9)
    values |= {"scale": torch.randn(9, generator=generator(1)), "nothing": torch.zeros(9, 0)}
    server = {name: value[0] * 3 for name, value in values.items()}
    for reduction in BUILT_IN_REDUCTIONS.values():
        if not reduction.is_uploaded:
            continue
        one, many = Aggregator(dict.fromkeys(values, reduction)), Aggregator(dict.fromkeys(values, reduction))
        one.accumulate(values, weights, range(9))
        for rows in (range(7), range(7, 9)):
            part = {name: value[list(rows)] for name, value in values.items()}
            own = [weights[row] for row in rows]
            many.accumulate(part, own, rows, many.weighted_sums(part, own))
        both = many.compute(server)
        for name, value in one.compute(server).items():
            found = both[name]
            if reduction.name == "mean" and value.is_floating_point():
                torch.testing.assert_close(found, value, rtol=4 * torch.finfo(value.dtype).eps, atol=1e-12)
            else:
                assert torch.equal(found, value)


def test_weighted_sum_similar_groups_fit_into_one_integer():
    exact, other, weights = ExactSum(torch.zeros(30, 20)), ExactSum(torch.zeros(30, 20)), [3.0, 8.0, 5.0]
    factors = torch.tensor(weights, dtype=torch.float64)
    for cohort in range(6):
        values = torch.randn(3, 30, 20, generator=generator(cohort)) * torch.logspace(0, -9, 20) / (1 + cohort)
        (total, unit), product = weighted_sum(values, weights), torch.einsum("c,cij->ij", factors, values.double())
        assert (total - product).abs().max() <= 2**-46 * product.abs().max()
        again, _ = weighted_sum(values.mT.contiguous().mT, weights)
        assert again.is_contiguous() and torch.equal(again, total)
        exact.add_multiples(total, unit)
        other.add(total[None])
        assert not bool((total % unit).any()) and total.abs().max() <= unit * 2**46
    assert None not in exact.scales() and torch.equal(exact.total(), other.total())


def test_add_multiples_any_magnitude_equals_exact_sum():
    exact, other = ExactSum(torch.zeros(200)), ExactSum(torch.zeros(200))
    for cohort, scale in enumerate((1.0, 1e-6, 3e9, 0.0, 1e-30, 2e-38, 0.1, 1.0)):
        total, unit = weighted_sum(scale * torch.randn(5, 200, generator=generator(cohort)), [1.0, 7.0, 2.0, 9.0, 3.0])
        assert unit == 0 if scale == 0 else unit > 0
        exact.add_multiples(total, unit) if unit else exact.add(total[None])
        other.add(total[None])
    mine, theirs = exact.digits(), other.digits()
    zeros = torch.zeros(200, dtype=torch.int64)
    assert all(torch.equal(mine.get(e, zeros), theirs.get(e, zeros)) for e in {*mine, *theirs})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_exact_sum_on_gpu_equals_cpu():
    for values in (make() for make in VALUES.values()):
        for weights in WEIGHTS.values():
            expected = bits(summed(values, weights).total())
            for together in (1, 5):
                assert bits(summed(values.cuda(), weights, together=together).total().cpu()) == expected


SETTINGS = [
    {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
    {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
]


@pytest.mark.slow
def test_exact_sum_any_threads_and_instructions_is_bitwise_identical(tmp_path):
    # Create the inputs in this process, because the numbers of torch.randn depend on the settings.
    inputs = {kind: make() for kind, make in VALUES.items()}
    inputs |= {"large": torch.linspace(-1, 1, 900_000, dtype=torch.float64).float().view(3, -1)}
    torch.save((inputs, uploads_of(30)), tmp_path / "inputs")
    code = f"import test_exact; print(test_exact.digest({str(tmp_path / 'inputs')!r}))"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    expected = digest(tmp_path / "inputs") + "\n"
    for settings in SETTINGS:
        env = {**os.environ, "PYTHONPATH": path, **settings}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == expected


def digest(path):
    """Return a digest of sums of all kinds, and of the results of all reductions."""
    inputs, (values, weights) = torch.load(path)
    found = [
        bits(summed(rows, given, together=together).total())
        for rows in inputs.values()
        for given in WEIGHTS.values()
        for together in (1, 8)
    ]
    for reduction in ("mean", "sparse_mean", "sum", "median", "trimmed_mean", "krum"):
        aggregator = Aggregator(dict.fromkeys(values, BUILT_IN_REDUCTIONS[reduction]))
        aggregator.accumulate(values, weights, range(len(weights)))
        found += map(bits, aggregator.compute({name: value[0] for name, value in values.items()}).values())
    return hashlib.sha256("".join(found).encode()).hexdigest()


@pytest.mark.seconds
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads the peak memory from Linux")
@pytest.mark.parametrize("clients", [2, 16])
def test_mean_memory_is_at_most_2_5_times_one_upload(clients):
    status, megabytes = pathlib.Path("/proc/self/status"), 8
    names = [f"layer{number}" for number in range(8)]

    def in_use(what):
        return int(re.search(rf"{what}:\s+(\d+) kB", status.read_text())[1]) / 1024

    upload = {name: torch.randn(1, megabytes << 18) for name in names}
    server = {name: value[0] for name, value in upload.items()}
    aggregator, before = Aggregator(dict.fromkeys(names, BUILT_IN_REDUCTIONS["mean"])), in_use("VmRSS")
    # Reset the peak memory that the kernel reports for this process.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for number in range(clients):
        aggregator.accumulate(upload, [1.0], [number])
    result = aggregator.compute(server)
    assert in_use("VmHWM") - before < 2.5 * megabytes * len(names)
    assert all(torch.equal(result[name], value) for name, value in server.items())
