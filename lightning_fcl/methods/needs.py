"""What a method cannot work without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What a method cannot work without.

    Args:
        labels: Batches are pairs ``[x, y]``.
        dicts: They may also be dicts of tensors, in a federation.
        tensors: Inputs and targets, or the values of a dict, are one tensor each, with a row for each sample: the
            method stores samples, or splits the samples of a round.
        logits: The module's output are logits of classes.
        loss: The module states the loss of samples apart from its training step.
        samples: `Method.end_round`, `Method.contribute` and those of an experience look at the round's samples.
        numbers: They look at the samples' numbers, `Client.history`, alone.
        features: The server uses clients' features or layer inputs. Frozen layers, such as batch normalization with
            frozen parameters, then stay in evaluation mode, so that all clients have the features of the server's body.
        federation: Why a plain Trainer does not do, to be read after "got a plain one:"; empty: it does.
        head: Entries that match the method's argument ``head`` stay with the clients, in a federation.
        uniform: All clients weigh alike in the federation's means.

    Example:
        >>> Needs(labels=True, federation="it has no clients").samples
        False
    """

    labels: bool = False
    dicts: bool = False
    tensors: bool = False
    logits: bool = False
    loss: bool = False
    samples: bool = False
    numbers: bool = False
    features: bool = False
    federation: str = ""
    head: bool = False
    uniform: bool = False
