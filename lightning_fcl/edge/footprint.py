"""What a module holds, computes and sends: parameters, MACs, activation memory and bytes on the wire, of one sample.

M_T is what a device trains, M_F what is frozen there (Kröger et al. 2025, "On-Device Federated Continual Learning on
RISC-V-based Ultra-Low-Power SoC for Intelligent Nano-Drone Swarms"). A parameter is trained if it requires a gradient
and is not declared ``fixed`` or ``download``; a reservoir's M_T is its readout. M_F computes in int8, on a byte for
each number, and M_T in fp32, on four.

A batch normalisation behind a convolution or linear layer is counted as folded into it: of its numbers a bias per
channel is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fcl.edge.macs import Layer, LayerRecorder, flop_counter, only_trained
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import (
    Reduction,
    ReductionRules,
    frozen_parameters,
    get_reductions,
    state_tensors,
)
from lightning_fcl.tasks.reservoir import ReservoirTask


@dataclass(frozen=True)
class StateEntry:
    """A tensor of a module's state, batch normalisation folded, and the bytes that a node sends and receives of it.

    A folded bias belongs to the convolution. ``num_elements`` are parameters: 0 for a counter, or the scales of int8
    weights. ``nbytes`` on the device: M_T as it is (fp32); of M_F a matrix has a byte for each weight and an fp32 scale
    for each row (output channel), a vector is fp32; what is int8 already is left as it is.
    """

    name: str
    layer: str
    num_elements: int
    is_trained: bool
    nbytes: int
    upload: int
    download: int


@dataclass(frozen=True)
class Footprint:
    """What a module holds, computes and sends.

    ``frozen_forward`` and ``trained_forward`` are MACs of one sample's forward pass of M_F and M_T, ``learning`` those
    of the backward pass of M_T, or of a reservoir's statistics, which take no forward pass of the readout. ``folded``
    counts batch normalisations, ``unfolded`` parameters before that; ``simulated`` are the bytes that the simulation's
    nodes send and receive in a round; ``uncounted`` are layers with weights of which no MACs are known.
    """

    entries: tuple[StateEntry, ...]
    layers: tuple[Layer, ...]
    frozen_forward: int
    trained_forward: int
    learning: int
    statistics: bool
    folded: int
    unfolded: int
    simulated: tuple[int, int]
    uncounted: tuple[str, ...] = ()

    @property
    def fp32_macs(self) -> int:
        """fp32 MACs of learning from one sample."""
        return self.learning + (0 if self.statistics else self.trained_forward)

    def num_elements(self, trained: bool) -> int:
        return sum(entry.num_elements for entry in self.entries if entry.is_trained == trained)

    def nbytes(self, trained: bool) -> int:
        """Bytes of M_T or of M_F on the device."""
        return sum(entry.nbytes for entry in self.entries if entry.is_trained == trained)

    @property
    def activation_nbytes(self) -> int:
        """Bytes of activations that a learning step keeps for the backward pass: the inputs of M_T's layers."""
        return 0 if self.statistics else sum(4 * layer.inputs for layer in self.layers if layer.trained)


def measure_footprint(module: nn.Module, input_shape: Sequence[int], rules: ReductionRules | None = None) -> Footprint:
    """What a module holds, computes and sends, from one sample of zeros in evaluation mode; it is left as it was.

    A reservoir task is taken apart. ``rules`` lie over the module's own reductions, as `FederatedStrategy` takes them.
    """
    reductions = get_reductions(module, rules)
    if isinstance(module, ReservoirTask):
        trained = {name for name in reductions if name.startswith("readout.")}
    else:
        state_names = {name for name, reduction in reductions.items() if reduction.is_uploaded or reduction.is_local}
        # What gathers statistics is learnt too, though no gradient reaches it.
        trained = {name for name in state_names if reductions[name].is_uploaded and not reductions[name].is_downloaded}
        trained |= {name for name, p in module.named_parameters() if p.requires_grad and name in state_names}
    parameter = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    sample = torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device)
    try:
        if isinstance(module, ReservoirTask):
            return _reservoir(module, sample, _entries(module, reductions, trained, {}))
        recorder = LayerRecorder(module)
        with only_trained(module, trained):
            backward = recorder.run(sample)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InvalidValueError(
            f"Expected a model that takes samples of shape {tuple(input_shape)} but it failed: {error}.",
            hint="Give the shape of a sample, without the batch, as in `--input 1,64,48`.",
        ) from error
    folded = {
        norm: layer
        for norm, layer in recorder.folded.items()
        # A frozen convolution with a norm that is trained, or the reverse, cannot be one.
        if all(
            (f"{norm}.{own}" in trained) == (f"{layer}.weight" in trained)
            for own in ("weight", "bias")
            if f"{norm}.{own}" in reductions
        )
    }
    entries, plain = _entries(module, reductions, trained, folded), _entries(module, reductions, trained, {})
    layers = []
    for layer in recorder.layers:
        if layer.name not in folded:
            layer_entries = [entry for entry in entries if entry.layer == layer.name]
            # A frozen layer behind a trained one hands gradients on in fp32.
            weights = sum(4 * entry.num_elements if layer.is_trained else entry.nbytes for entry in layer_entries)
            learnt = weights if any(entry.is_trained for entry in layer_entries) else 0
            layers.append(replace(layer, weights=weights, trained=learnt))
    # What elementwise layers hold is the buffer of the layer before, which they work on in place.
    layers = [layer for layer in layers if layer.weights or layer.name not in recorder.in_place]
    return Footprint(
        entries=entries,
        layers=tuple(layers),
        frozen_forward=recorder.frozen,
        trained_forward=recorder.learnt,
        learning=backward,
        statistics=False,
        folded=len(folded),
        unfolded=sum(parameter.numel() for parameter in module.parameters()),
        simulated=(sum(entry.upload for entry in plain), sum(entry.download for entry in plain)),
        uncounted=tuple(layer.name for layer in layers if layer.name in recorder.uncounted),
    )


def _entries(
    module: nn.Module, reductions: Mapping[str, Reduction], trained: set[str], folded: Mapping[str, str]
) -> tuple[StateEntry, ...]:
    """The state, entry by entry; ``folded`` tells the convolution of each batch normalisation that is folded."""
    state, result, frozen = state_tensors(module), [], frozen_parameters(module, reductions)
    for name, value in state.items():
        layer, _, tensor_name = name.rpartition(".")
        learnt = name in trained
        if layer in folded:
            stands = "bias" if f"{layer}.bias" in state else "running_mean"
            if tensor_name != stands or f"{folded[layer]}.bias" in state:
                continue
            layer = folded[layer]
            learnt = f"{layer}.weight" in trained
        # Neither counters are parameters nor the scales of a layer that is quantised already.
        scale = value.is_floating_point() and not state.get(f"{layer}.weight", value).is_floating_point()
        is_excluded = scale or (value.dim() == 0 and not isinstance(value, nn.Parameter))
        size, reduction = value.nbytes, reductions[name]
        if not learnt and value.is_floating_point():
            size = value.numel() + 4 * len(value) if value.dim() > 1 else 4 * value.numel()
        travels = value.nbytes * (name not in frozen)  # every device has it as it was published
        upload_bytes, download_bytes = reduction.is_uploaded * travels, reduction.is_downloaded * travels
        result.append(
            StateEntry(name, layer, 0 if is_excluded else value.numel(), learnt, size, upload_bytes, download_bytes)
        )
    return tuple(result)


def _reservoir(task: ReservoirTask, sample: Tensor, entries: tuple[StateEntry, ...]) -> Footprint:
    """A reservoir is frozen; its readout adds each state's outer products to A and B (Bacciu et al. 2021, eq. 11-12).

    A device takes a step at a time: it holds a step's input and two states of the layer at hand.
    """
    with torch.no_grad(), flop_counter() as counter:
        pooled = list(task.readout_inputs(sample))
        frozen = counter.get_total_flops() // 2
        for states in pooled:
            task.readout(states)
        forward = counter.get_total_flops() // 2 - frozen
    size = {entry.name: entry.nbytes for entry in entries}
    units, features, outputs = task.reservoir.units, task.reservoir.features, task.readout.out_features
    layers = []
    for number in range(task.reservoir.num_layers):
        drive, _ = task.reservoir.weights(number)
        weights = sum(size[f"reservoir.{kind}_weight_{number}"] for kind in ("input", "recurrent"))
        weights += 3 * 4 * units  # gain, bias and recurrent bias
        layers.append(Layer(f"reservoir layer {number + 1}", False, drive.shape[1] + units, units, weights))
    statistics = size["readout.A"] + size["readout.B"]
    layers.append(Layer("readout", True, features, outputs, size["readout.weight"], trained=statistics))
    # B is symmetric: half of it, and the diagonal, is computed.
    learning = sum(len(states) for states in pooled) * (features * (features + 1) // 2 + outputs * features)
    wire = (sum(entry.upload for entry in entries), sum(entry.download for entry in entries))
    numbers = sum(entry.num_elements for entry in entries)
    return Footprint(entries, tuple(layers), frozen, forward, learning, True, 0, numbers, wire)
