"""What a method cannot work without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What a method cannot work without.

    Args:
        labels: Batches are pairs ``[x, y]``.
        dict_batches: They may also be dicts of tensors, in a federation.
        tensors: Inputs and targets, or the values of a dict, are one tensor each, with a row for each sample: the
            method stores samples, or splits the samples of a round.
        logits: The module's output are logits of classes.
        sample_loss: The module states the loss of samples apart from its training step.
        round_samples: `Method.update_client_state`, `Method.upload_statistics` and those of an experience look at the
            round's samples.
        numbers: They look at the samples' numbers, `Client.history`, alone.
        features: The server uses clients' features or layer inputs. Frozen layers, such as batch normalization with
            frozen parameters, then stay in evaluation mode, so that all clients have the features of the server's body.
        federation_reason: Why a plain Trainer does not do, to be read after "got a plain one:"; empty: it does.
        local_head: Entries that match the method's argument ``local_head`` stay with the clients, in a federation.
        uniform_weights: All clients weigh alike in the federation's means.

    Example:
        >>> Needs(labels=True, federation_reason="it has no clients").round_samples
        False
    """

    labels: bool = False
    dict_batches: bool = False
    tensors: bool = False
    logits: bool = False
    sample_loss: bool = False
    round_samples: bool = False
    numbers: bool = False
    features: bool = False
    federation_reason: str = ""
    local_head: bool = False
    uniform_weights: bool = False
