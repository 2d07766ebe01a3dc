"""Echo state networks: recurrent networks whose random weights are never trained (Jaeger, 2001)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import above, at_least, unit_interval, warn_of_one

# Number of time steps per block. `EchoStateNetwork.iter_states` has the states of only one block in memory at once.
BLOCK = 64


class EchoStateNetwork(Serializable):
    """A reservoir of leaky-integrator units in layers (De Caro et al., 2023, eq. 1; Bacciu et al., 2021, eq. 1).

    ``x(t) = (1 - a) x(t-1) + a tanh(g (W_in u(t) + b_rec + W x(t-1)) + b)``, with ``x = 0`` at the start of each
    sequence. x is the state, u the input, W_in the input weights, W the recurrent weights, and a the leaking rate. In a
    deep reservoir, the states of a layer are the input of the next layer. The state of the network is the concatenation
    of the states of all layers, of size N_R. ``gain`` (g) and ``bias`` (b), both of shape (N_R,), are 1 and 0 until
    intrinsic plasticity adapts them (`lightning_fcl.callbacks.IntrinsicPlasticity`). All other weights are random and
    fixed.

    Args:
        in_features: Size of the input at each time step.
        units: Number of units of each layer. N_R is ``num_layers * units``.
        num_layers: Number of layers.
        spectral_radius: Largest absolute eigenvalue of each layer's recurrent weights after rescaling.
        leaking_rate: Fraction ``a`` of the new activation in the state, above 0 and at most 1.
        input_scaling: Input weights are uniform between ``-input_scaling`` and ``input_scaling``.
        input_connectivity: Number of inputs that each unit receives. A float is a fraction of the inputs (1.0 for all
            inputs), an integer is a count.
        recurrent_connectivity: Number of units in the same layer from which each unit receives input. A float is a
            fraction of the units, an integer is a count.
        bias_scaling: The constant input b_rec of each unit is uniform between ``-bias_scaling`` and ``bias_scaling``.
        washout: Number of time steps at the start of each sequence whose states are dropped.
        seed: Seed of all weights. None draws a seed from torch's global generator.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> reservoir = EchoStateNetwork(3, units=50, leaking_rate=0.5, seed=0)
        >>> reservoir(torch.zeros(2, 10, 3)).shape
        torch.Size([2, 10, 50])
    """

    citations = ("decaro2023fedclip", "bacciu2021incfed")

    gain: nn.Parameter
    bias: nn.Parameter
    recurrent_bias: Tensor

    def __init__(
        self,
        in_features: int,
        units: int = 100,
        num_layers: int = 1,
        spectral_radius: float = 0.9,
        leaking_rate: float = 1.0,
        input_scaling: float = 1.0,
        # Keep the order of types: jsonargparse converts to the first type of a union that matches.
        input_connectivity: int | float = 1.0,
        recurrent_connectivity: int | float = 1.0,
        bias_scaling: float = 0.0,
        washout: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        at_least(1, in_features=in_features, units=units, num_layers=num_layers)
        unit_interval(leaking_rate=leaking_rate)
        above(0, spectral_radius=spectral_radius, input_scaling=input_scaling)
        if in_features > 1 or num_layers > 1:
            warn_of_one("input_connectivity", input_connectivity, "1 input of each unit", "all inputs")
        if units > 1:
            warn_of_one("recurrent_connectivity", recurrent_connectivity, "1 input unit of each unit", "all units")
        at_least(0, bias_scaling=bias_scaling, washout=washout)
        self.in_features = in_features
        self.units = units
        self.num_layers = num_layers
        self.leaking_rate = leaking_rate
        self.washout = washout
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        for layer in range(num_layers):
            inputs = in_features if layer == 0 else units
            drive = torch.rand(units, inputs, generator=generator) * 2 - 1
            drive *= input_scaling * _mask(units, inputs, input_connectivity, "input_connectivity", generator)
            recurrent = torch.randn(units, units, generator=generator)
            recurrent *= _mask(units, units, recurrent_connectivity, "recurrent_connectivity", generator)
            self.register_buffer(f"input_weight_{layer}", drive)
            # Each unit has an incoming connection, so the connections contain a cycle, and the radius is above 0.
            current = float(torch.linalg.eigvals(recurrent.double()).abs().max())
            rescaled = (recurrent.double() * (spectral_radius / current)).to(recurrent.dtype)
            self.register_buffer(f"recurrent_weight_{layer}", rescaled)
        noise = torch.rand(self.features, generator=generator) * 2 - 1
        self.register_buffer("recurrent_bias", bias_scaling * noise)
        self.gain = nn.Parameter(torch.ones(self.features))
        self.bias = nn.Parameter(torch.zeros(self.features))

    @property
    def features(self) -> int:
        """Size N_R of the state, ``num_layers * units``."""
        return self.num_layers * self.units

    def reset_plasticity(self) -> None:
        """Set gain to 1 and bias to 0."""
        with torch.no_grad():
            self.gain.fill_(1)
            self.bias.zero_()

    def weights_hash(self) -> int:
        """Return a hash of the weights, gain, bias, leaking rate and washout.

        Readouts of two reservoirs can be combined only if the reservoirs have the same hash.
        """
        digest = hashlib.sha256(repr((self.leaking_rate, self.washout)).encode())
        for value in self.state_dict().values():
            # NumPy has no bfloat16, so hash the bytes.
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest()[:7], "little")

    def forward(self, x: Tensor) -> Tensor:
        """Return the states after the washout, shape (batch, time - washout, features).

        The inputs have shape (batch, time, in_features).
        """
        return torch.cat(list(self.iter_states(x))).transpose(0, 1)

    @torch.no_grad()
    def iter_states(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the states after the washout in blocks of time steps, each of shape (steps, batch, features).

        Only the current block is in memory.
        """
        x = self.check_input(x)
        weights = [self._effective(layer) for layer in range(self.num_layers)]
        states = [x.new_zeros(len(x), self.units) for _ in range(self.num_layers)]
        for start in range(0, x.shape[1], BLOCK):
            drive = x[:, start : start + BLOCK].transpose(0, 1)
            outputs = []
            for layer, effective in enumerate(weights):
                drive, states[layer] = self._run(effective, drive, states[layer])
                outputs.append(drive)
            if start + len(drive) > self.washout:
                whole = outputs[0] if self.num_layers == 1 else torch.cat(outputs, dim=-1)
                yield whole[max(0, self.washout - start) :]

    def _effective(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's input weights, recurrent weights and constant input, multiplied by the gain.

        The constant input includes the bias, which is not multiplied.
        """
        unit_slice = self._part(layer)
        drive, recurrent = self.weights(layer)
        gain = self.gain[unit_slice]
        return (
            gain[:, None] * drive,
            gain[:, None] * recurrent,
            self.bias[unit_slice] + gain * self.recurrent_bias[unit_slice],
        )

    def _part(self, layer: int) -> slice:
        return slice(layer * self.units, (layer + 1) * self.units)

    def weights(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's input weights (units, inputs) and recurrent weights (units, units)."""
        return getattr(self, f"input_weight_{layer}"), getattr(self, f"recurrent_weight_{layer}")

    def _run(self, effective: tuple[Tensor, Tensor, Tensor], u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of one layer for a block of inputs (steps, batch, inputs), and a copy of the last state."""
        w_in, w, constant = effective
        out = torch.addmm(constant, u.reshape(-1, u.shape[-1]), w_in.t()).view(*u.shape[:2], -1)
        transposed, leak = w.t(), self.leaking_rate
        for step in out.unbind(0):
            tanh_(step.addmm_(state, transposed))
            if leak != 1:
                torch.lerp(state, step, leak, out=step)
            state = step
        return out, state.clone()

    @torch.no_grad()
    def plasticity_gradients(
        self,
        x: Tensor,
        mu: float,
        sigma: float,
        gain: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the descent directions of KL(activations || N(mu, sigma)) for each sequence (Schrauwen et al., 2008).

        ``h`` is the activation before the leak, and g the gain. ``net`` is the net input of a unit, which is treated as
        constant. The directions are ``db = -(-mu/s2 + h/s2 (2 s2 + 1 - h^2 + mu h))`` with s2 = sigma^2, and
        ``dg = 1/g + db net``, each summed over the time steps after the washout. This is eq. 4 of De Caro et al., with
        the terms that are missing in the printed paper.

        Args:
            x: Inputs of shape (batch, time, in_features).
            mu: Mean of the target distribution.
            sigma: Standard deviation of the target distribution.
            gain: Gain to use instead of the module's gain.
            bias: Bias to use instead of the module's bias.

        Returns:
            The directions dg and db, both of shape (batch, features). They are not multiplied by a step size.
        """
        x = self.check_input(x)
        gain = self.gain.detach() if gain is None else gain
        bias = self.bias.detach() if bias is None else bias
        state = x.new_zeros(len(x), self.units)
        layers = [_LayerPlasticity(self, layer, state, gain, bias, mu, sigma**2) for layer in range(self.num_layers)]
        for start in range(0, x.shape[1], BLOCK):
            drive = x[:, start : start + BLOCK].transpose(0, 1)
            for plasticity in layers:
                drive = plasticity.run(drive, skip=self.washout - start)
        dg, db = (torch.cat(columns, dim=-1) for columns in zip(*(p.directions() for p in layers), strict=True))
        return dg, db

    def check_input(self, x: Tensor) -> Tensor:
        """Return the input in the reservoir's precision, or raise ValueError if its shape or a value is invalid."""
        if x.dim() != 3 or x.shape[-1] != self.in_features:
            raise InvalidValueError(
                f"Expected inputs of shape (batch, time, {self.in_features}) but got {tuple(x.shape)}.",
                hint="Set the reservoir's `in_features` to the data's number of features, and put time before "
                "features.",
                argument="in_features",
                value=tuple(x.shape),
            )
        if x.shape[1] <= self.washout:
            raise InvalidValueError(
                f"Expected more time steps per sequence than `washout`={self.washout} but got {x.shape[1]}.",
                hint="Decrease `washout`, or use longer sequences.",
                argument="washout",
                value=self.washout,
            )
        x = x.to(self.gain.dtype)
        # Exported graphs cannot raise errors, so skip the check.
        if not torch.compiler.is_exporting() and not torch.isfinite(x.sum()):
            bad = (~torch.isfinite(x)).flatten(1).any(dim=1).nonzero().flatten()
            if len(bad):  # the sum of finite numbers can overflow
                raise InvalidValueError(
                    f"Expected finite sequences, but got NaN or infinite values in {len(bad)} of {len(x)} sequences. "
                    f"The first such sequence has index {int(bad[0])} in the batch.",
                    hint="Correct or drop these sequences.",
                    argument="x",
                    value=bad.tolist(),
                )
        return x

    def fold_plasticity(self) -> EchoStateNetwork:
        """Return an equivalent reservoir with gain 1 and bias 0. Its weights include this reservoir's gain and bias."""
        other = EchoStateNetwork(self.in_features, self.units, self.num_layers, washout=self.washout, seed=0)
        other = other.to(self.gain.device, self.gain.dtype)
        other.leaking_rate = self.leaking_rate
        with torch.no_grad():
            for layer in range(self.num_layers):
                targets = (*other.weights(layer), other.recurrent_bias[self._part(layer)])
                for target, value in zip(targets, self._effective(layer), strict=True):
                    target.copy_(value)
        return other

    def extra_repr(self) -> str:
        return f"{self.in_features}, units={self.units}, layers={self.num_layers}, leaking_rate={self.leaking_rate}"


def _mask(rows: int, columns: int, connectivity: int | float, name: str, generator: torch.Generator) -> Tensor:
    """Return a random mask (rows, columns). Each row has the same number of ones, which mark the inputs of a unit."""
    count = max(1, round(connectivity * columns)) if isinstance(connectivity, float) else connectivity
    if connectivity <= 0 or not 1 <= count <= columns or (isinstance(connectivity, float) and connectivity > 1):
        raise InvalidValueError(
            f"Expected `{name}` to be a fraction above 0 and at most 1.0, or a count between 1 and {columns}, but got "
            f"{connectivity}.",
            argument=name,
            value=connectivity,
        )
    if count == columns:
        return torch.ones(rows, columns)
    column_indices = torch.rand(rows, columns, generator=generator).argsort(dim=1)[:, :count]
    return torch.zeros(rows, columns).scatter_(1, column_indices, 1.0)


class _LayerPlasticity:
    """An accumulator that sums the descent directions of one layer over time steps."""

    def __init__(
        self, net: EchoStateNetwork, layer: int, state: Tensor, gain: Tensor, bias: Tensor, mu: float, variance: float
    ) -> None:
        unit_slice = net._part(layer)
        self.drive, self.recurrent = (weights.t() for weights in net.weights(layer))
        self.gain, self.bias, self.constant = (
            gain[..., unit_slice],
            bias[..., unit_slice],
            net.recurrent_bias[unit_slice],
        )
        self.leak, self.state, self.mu, self.variance = net.leaking_rate, state, mu, variance
        self.steps = 0
        # `shift` is the sum of -s2 db, and `product` is the sum of -s2 net db, where s2 is the variance.
        self.shift, self.product = torch.zeros_like(state), torch.zeros_like(state)

    def run(self, u: Tensor, skip: int) -> Tensor:
        """Process a block of inputs (steps, batch, inputs), and return the layer's states.

        The sums do not include the first ``skip`` steps.
        """
        net = torch.addmm(self.constant, u.reshape(-1, u.shape[-1]), self.drive).view(*u.shape[:2], -1)
        h, shift = torch.empty_like(self.state), torch.empty_like(self.state)
        for t, step in enumerate(net.unbind(0)):
            step.addmm_(self.state, self.recurrent)
            tanh_(torch.addcmul(self.bias, step, self.gain, out=h))
            if t >= skip:
                # Compute -s2 db = h (1 + 2 s2 - h^2 + mu h) - mu.
                torch.mul(h, h, out=shift).neg_().add_(1 + 2 * self.variance)
                if self.mu:
                    shift.add_(h, alpha=self.mu)
                shift.mul_(h).sub_(self.mu)
                self.shift.add_(shift)
                self.product.addcmul_(step, shift)
                self.steps += 1
            # The net input of this step is no longer needed, so the state overwrites it.
            self.state = torch.lerp(self.state, h, self.leak, out=step)
        self.state = self.state.clone()
        return net

    def directions(self) -> tuple[Tensor, Tensor]:
        """Return the directions dg of the gain and db of the bias, both of shape (batch, units)."""
        return self.steps / self.gain - self.product / self.variance, self.shift / -self.variance


def tanh_(values: Tensor) -> None:
    """Apply the hyperbolic tangent in place. On CPUs, NumPy is several times faster than torch and equally precise."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        array = values.numpy()
        np.tanh(array, out=array)
    else:
        values.tanh_()
