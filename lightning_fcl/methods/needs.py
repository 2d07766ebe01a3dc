"""The requirements that a method declares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """The requirements of a method on the module, the data and the Trainer.

    If a requirement is not met, an error is raised before the first round, or at the first batch that does not meet the
    requirement. Four fields are not requirements: ``dict_batches`` permits more batches, ``round_samples`` and
    ``numbers`` declare what the hooks read, and ``features`` changes the mode of frozen layers.

    Args:
        labels: Batches are pairs ``[x, y]``.
        dict_batches: In a federation, batches may also be dicts of tensors.
        tensors: Each part of a batch (inputs, targets, or a value of a dict) is one tensor with one row per sample. Set
            this if the method stores samples or splits the samples of a round.
        logits: The module's output is a tensor of class logits.
        sample_loss: The module defines a method ``sample_loss(output, y)`` that returns the loss of each sample.
        round_samples: `Method.update_client_state`, `Method.upload_statistics`, `Method.end_experience` or
            `Method.contribute_experience` read the samples of the round.
        numbers: The hooks named under ``round_samples`` read only the sample numbers, through `Client.history`.
        features: The server uses the clients' features or layer inputs. Frozen layers, such as batch normalization with
            frozen parameters, then stay in evaluation mode. All clients thus compute features with the server's
            normalization statistics.
        federation_reason: Why the method does not run in a plain Trainer. The text ends the error message, after a
            colon. An empty text means that the method runs in a plain Trainer.
        local_head: Tensors that match the method's argument ``head_pattern`` must be client-local in a federation.
        uniform_weights: All clients must have equal weights in the federation's means.

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
