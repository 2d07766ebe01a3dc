"""Footprint of a module: parameters, MACs of one sample, activation memory, and transmitted bytes.

M_T is the trained part of a module on a device, and M_F is the frozen part (Kröger et al. 2025, "On-Device Federated
Continual Learning on RISC-V-based Ultra-Low-Power SoC for Intelligent Nano-Drone Swarms"). A parameter is trained if it
requires a gradient, and its reduction is not `constant` or `download_only`. M_T of a reservoir is the readout.
M_F computes in int8, with 1 byte per weight and activation. Biases and scales of M_F are fp32. M_T, and each layer
after M_T, compute in fp32, with 4 bytes per number.

A batch normalization after a convolution or linear layer counts as folded into this layer if both are frozen or both
are trained. The folded layer has one bias per channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fcl.edge.macs import Layer, LayerRecorder, flop_counter, only_trained
from lightning_fcl.edge.outputs import get_outputs, iter_leaves
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
    """A tensor of a module's state after folding of batch normalization, and the bytes that a node transmits for it.

    The bias of a folded batch normalization counts as a tensor of the layer before the normalization.

    Args:
        name: Name of the tensor.
        layer: Name of the layer that contains the tensor.
        num_elements: Number of parameters. 0 for a counter, or for the scales of int8 weights.
        is_trained: Whether the tensor belongs to the trained part M_T.
        nbytes: Bytes on the device. A tensor of M_T is stored unchanged (fp32). A matrix of M_F needs 1 byte per
            weight, and an fp32 scale for each row (output channel). A vector of M_F is fp32. An int8 tensor is
            unchanged.
        upload: Bytes that a node uploads in a round.
        download: Bytes that a node downloads in a round.
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
    """Parameters, MACs, memory and transmitted bytes of a module.

    Args:
        entries: The tensors of the state.
        layers: The layers in the order of the forward pass.
        frozen_forward: MACs of one sample's forward pass of the frozen part M_F.
        trained_forward: MACs of one sample's forward pass of the trained part M_T.
        learning: MACs of one sample's backward pass of M_T, or of a reservoir's statistics.
        statistics: Whether the module learns by statistics, without a forward pass of the readout.
        folded: Number of folded batch normalizations.
        unfolded: Number of parameters before folding.
        simulated: Bytes that a node uploads and downloads in a round of the simulation, without folding.
        uncounted: Names of layers with weights whose MACs could not be counted.
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
        """Number of fp32 MACs for learning from one sample."""
        return self.learning + (0 if self.statistics else self.trained_forward)

    def num_elements(self, trained: bool) -> int:
        return sum(entry.num_elements for entry in self.entries if entry.is_trained == trained)

    def nbytes(self, trained: bool) -> int:
        """Return the bytes on the device of the trained part M_T (``trained=True``), or of the frozen part M_F."""
        return sum(entry.nbytes for entry in self.entries if entry.is_trained == trained)

    @property
    def activation_nbytes(self) -> int:
        """Bytes of activations that a learning step stores: the inputs of the trained layers. 0 for a reservoir."""
        return 0 if self.statistics else sum(4 * layer.inputs for layer in self.layers if layer.trained)


def measure_footprint(module: nn.Module, input_shape: Sequence[int], rules: ReductionRules | None = None) -> Footprint:
    """Measure the footprint of a module on one sample of zeros in evaluation mode. The module is not changed.

    Args:
        module: The module. A reservoir task is measured by its reservoir and its readout.
        input_shape: Shape of a sample, without the batch dimension.
        rules: Reductions by pattern, as in `FederatedStrategy`, which override the reductions of the module.

    Raises:
        ValueError: If the module does not accept samples of this shape.
        TypeError: If the module returns no tensor, also not in dicts, lists, tuples or dataclasses.
    """
    reductions = get_reductions(module, rules)
    if isinstance(module, ReservoirTask):
        trained = {name for name in reductions if name.startswith("readout.")}
    else:
        state_names = {name for name, reduction in reductions.items() if reduction.is_uploaded or reduction.is_local}
        # Statistics also count as trained, although they have no gradient.
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
            f"Expected a model that accepts samples of shape {tuple(input_shape)}, but the model raised: {error}.",
            hint="Pass the shape of a sample without the batch dimension, as in `input_shape=(1, 64, 48)` or "
            "`--input 1,64,48`.",
        ) from error
    if not any(isinstance(leaf, Tensor) for _, leaf in iter_leaves(recorder.returned)):
        get_outputs(recorder.returned)  # Raises an error. Without outputs, no layer would be trained.
    folded = {
        norm: layer
        for norm, layer in recorder.folded.items()
        # A batch normalization can only be folded if it and the layer before it are both frozen, or both trained.
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
            # A frozen layer after a trained layer propagates gradients in fp32.
            weights = sum(4 * entry.num_elements if layer.is_trained else entry.nbytes for entry in layer_entries)
            learnt = weights if any(entry.is_trained for entry in layer_entries) else 0
            layers.append(replace(layer, weights=weights, trained=learnt))
    # Elementwise layers work in place, on the buffer of the previous layer. They need no additional memory.
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
    """Return the tensors of the state. ``folded`` maps each folded batch normalization to the layer before it."""
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
        # Counters, and scales of layers that are already quantized, are not parameters.
        scale = value.is_floating_point() and not state.get(f"{layer}.weight", value).is_floating_point()
        is_excluded = scale or (value.dim() == 0 and not isinstance(value, nn.Parameter))
        size, reduction = value.nbytes, reductions[name]
        if not learnt and value.is_floating_point():
            size = value.numel() + 4 * len(value) if value.dim() > 1 else 4 * value.numel()
        # Frozen tensors are not transmitted, because every device has them from the published model.
        travels = value.nbytes * (name not in frozen)
        upload_bytes, download_bytes = reduction.is_uploaded * travels, reduction.is_downloaded * travels
        result.append(
            StateEntry(name, layer, 0 if is_excluded else value.numel(), learnt, size, upload_bytes, download_bytes)
        )
    return tuple(result)


def _reservoir(task: ReservoirTask, sample: Tensor, entries: tuple[StateEntry, ...]) -> Footprint:
    """Return the footprint of a reservoir task.

    The reservoir is frozen. For each state, the readout adds the outer product of target and state to the sum A, and
    the outer product of the state with itself to the sum B (Bacciu et al. 2021, eq. 11-12). A device computes the time
    steps in sequence. The device stores the input of a step, and two states of the current layer.
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
        # Add the gain, the bias and the recurrent bias in fp32.
        weights += 3 * 4 * units
        layers.append(Layer(f"reservoir layer {number + 1}", False, drive.shape[1] + units, units, weights))
    statistics = size["readout.A"] + size["readout.B"]
    layers.append(Layer("readout", True, features, outputs, size["readout.weight"], trained=statistics))
    # B is symmetric, so only one triangle and the diagonal are computed.
    learning = sum(len(states) for states in pooled) * (features * (features + 1) // 2 + outputs * features)
    wire = (sum(entry.upload for entry in entries), sum(entry.download for entry in entries))
    numbers = sum(entry.num_elements for entry in entries)
    return Footprint(entries, tuple(layers), frozen, forward, learning, True, 0, numbers, wire)
