"""Time to project a gradient against other gradients, compared with the usual implementation.

    OMP_NUM_THREADS=1 python benchmarks/projection.py

The usual implementation follows the code of GEM's authors. Torch dot products show whether a constraint is violated. If
so, the gradients are converted to NumPy arrays in double precision. G is the matrix of the k other gradients with p
entries each, as rows, and g is the gradient. quadprog gets G G^T and G g, and returns k coefficients v. Then G^T v + g
is converted back to single precision. The script times two layouts: gradients as rows, as in this library, and
gradients as columns of a (p, k) matrix, as in the authors' code. All implementations solve the same problem with k
independent gradients. About half of the constraints are violated. The last case compares the time of Wasserstein
distances (`gradient_distance`) with torch's sort. The results are compared before the timing. The implementations
alternate in one process. `--quick` uses small sizes to test the script. Run nothing else on the machine.
"""

import argparse
import statistics
import time

import numpy as np
import quadprog
import torch

from lightning_fcl.methods.projection import gradient_distance, project


def problem(k, p):
    """Return a gradient and k other gradients. About half of the k dot products with the gradient are negative."""
    generator = torch.Generator().manual_seed(0)
    gradient, other_gradients = torch.randn(p, generator=generator), torch.randn(k, p, generator=generator)
    other_gradients += 0.1 * gradient * torch.where(torch.arange(k) % 2 == 0, 1.0, -1.0)[:, None]
    return gradient, other_gradients


def usual(gradient, other_gradients):
    """Return the usual implementation's projection: torch dot products and a double-precision quadratic program."""
    dots = torch.stack([torch.dot(gradient, other) for other in other_gradients])
    if not (dots < 0).any():
        return gradient
    rows, g = other_gradients.double().numpy(), gradient.double().numpy()
    k = len(rows)
    matrix = rows @ rows.T
    matrix = 0.5 * (matrix + matrix.T) + 1e-3 * np.eye(k)
    weights = quadprog.solve_qp(matrix, -(rows @ g), np.eye(k), np.zeros(k))[0]
    return torch.from_numpy(weights @ rows + g).float()


def usual_in_columns(gradient, columns):
    """Return the result of `usual` for constraint gradients that are the columns of a matrix of shape (p, k)."""
    dots = torch.mm(gradient[None], columns)
    if not (dots < 0).any():
        return gradient
    return usual(gradient, columns.T)


def distance_in_torch(gradient, other_gradients):
    """Return the Wasserstein distances between a gradient and each of the other gradients, with torch's sort."""
    ordered = gradient.sort().values
    return torch.stack([(other.sort().values - ordered).abs().mean(dtype=torch.float64) for other in other_gradients])


def timed(function, *args):
    """Return the wall time in seconds of one call of a function."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def compare(name, our_function, usual_function, args, repeats):
    """Print the ratio of the usual implementation's time to this library's time. The implementations alternate."""
    # The first call is a warm-up.
    for function in (our_function, usual_function):
        function(*args)
    times = [(timed(our_function, *args), timed(usual_function, *args)) for _ in range(repeats)]
    ratios = [b / a for a, b in times]
    ours_ms, theirs_ms = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{name:36} ours {ours_ms:8.1f} ms, usual {theirs_ms:8.1f} ms, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def main():
    """Compare all cases, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="use small sizes to test the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats = 2 if options.quick else options.repeats
    sizes = [20_000, 50_000] if options.quick else [2_700_000, 5_000_000]
    print(f"torch {torch.__version__}, {options.threads} thread(s), {repeats} repeats. The engines alternate.")
    for p in sizes:
        args = problem(10, p)
        our_projection, usual_projection = project(*args), usual(*args)
        assert our_projection is not args[0]
        assert float((our_projection - usual_projection).norm() / usual_projection.norm()) < 1e-5
        columns = args[1].T.contiguous()
        compare(f"project on 10 of {p:,}; rows", project, usual, args, repeats)
        compare(
            f"project on 10 of {p:,}; columns", project, lambda g, _, c=columns: usual_in_columns(g, c), args, repeats
        )
    args = problem(10, sizes[0])
    torch.testing.assert_close(gradient_distance(*args), distance_in_torch(*args))
    compare(f"wasserstein to 10 of {sizes[0]:,}", gradient_distance, distance_in_torch, args, repeats)


if __name__ == "__main__":
    main()
