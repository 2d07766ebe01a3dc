"""TARGET: distillation of the old model on synthetic samples from a generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.base import ReplaySamples
from lightning_fcl.methods.context import Client, Server, Step
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.functional import predictions, to_input
from lightning_fcl.methods.generative import GenerativeMethod, generator_training, take_step
from lightning_fcl.methods.method import add_seen_classes, class_mask, mask_other_classes, match_output
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.prototypes import SparseSum
from lightning_fcl.models.generator import with_statistics_distance
from lightning_fcl.validation import above, at_least, validated


@dataclass(eq=False)
class TARGET(GenerativeMethod):
    """TARGET (Zhang et al., 2023): distill old classes on images that the server generates without client data.

    The loss is ``task loss + distillation_weight * KD``. KD compares the logits of old classes on a batch of generated
    images. The teacher is the server's model at the end of the previous experience. In the paper, the cross-entropy is
    among the classes of the current experience only: add ``MeanOutputLoss(mu=0.0)`` for this. With a cross-entropy over
    all classes, the method does not prevent forgetting. The network needs batch normalization. Samples can also be
    feature vectors instead of images.

    When an experience ends, the server generates ``num_images`` images in batches. For each batch, the server trains a
    generator, so that the server's model predicts randomly drawn classes for the images. The images' statistics in the
    batch normalization layers must also match the running statistics (`with_statistics_distance`). In each round of the
    next experience, the server sends the images and their logits to each client, instead of the old model. For this
    purpose, a client also uploads the set of classes of all experiences so far.

    Deviation: the authors' generator starts each batch from a meta-learned state. From its 20th batch on, it has a
    student as an adversary. Here one generator continues from batch to batch, without a student. The defaults are
    smaller than the authors' values for CIFAR-100: 8,000 images, batches of 256, and a generator of width 64. The
    authors take 10 generator steps for each batch.

    Args:
        distillation_weight: Weight of the distillation, at least 0. With 0, the server generates no images.
        num_images: Number of images to generate, at least 0.
        batch_size: Number of generated images that a client draws for each training step, at least 2. It is also the
            batch size of the generator.
        num_steps: Number of generator steps for each batch of images, at least 1.
        width: Width of the generator. See `Generator`.
        statistics_weight: Weight of the statistics in the generator's loss, at least 0. The cross-entropy has the
            weight 0.5.
        temperature: Temperature that softens the outputs of teacher and student, above 0.

    Raises:
        ValueError: If an argument is out of range, or the Trainer does not run a federation. Also if the samples are
            neither images nor vectors, or the module has no batch normalization statistics or no class logits.

    Example:
        >>> TARGET(batch_size=16).replay_batch_size
        16
    """

    citations: ClassVar[tuple[str, ...]] = ("zhang2023target",)

    needs: ClassVar[Needs] = Needs(
        logits=True, tensors=True, federation_reason="it has no server that generates images. Use the strategy"
    )
    reductions: ClassVar[ReductionRules] = {"images": "download_only", "logits": "download_only", "ended": SparseSum()}

    distillation_weight: float = validated(25.0, at_least, 0)
    num_images: int = validated(256, at_least, 0)
    batch_size: int = validated(64, at_least, 2)
    num_steps: int = validated(50, at_least, 1)
    width: int = validated(16, at_least, 1)
    statistics_weight: float = validated(10.0, at_least, 0)
    temperature: float = validated(2.0, above, 0)

    @property
    def replay_batch_size(self) -> int:
        return self.batch_size

    @property
    def is_generating(self) -> bool:
        return self.distillation_weight > 0 and self.num_images > 0

    def init_server_state(self, module: L.LightningModule) -> State:
        if not self.is_generating:
            return {}
        empty_tensor = torch.zeros(0, device=module.device)
        return {"images": empty_tensor, "logits": empty_tensor, "ended": empty_tensor.new_zeros(self._classes)}

    def prepare_client_state(self, client: Client) -> StateSection:
        synthetic_samples = {name: value for name, value in client.server_state.items() if name in ("images", "logits")}
        return {
            **synthetic_samples,
            "old": class_mask(client.client_round.num_classes, client.client_round.old_classes),
        }

    def replay_samples(self, client: Client) -> ReplaySamples:
        return {name: client.method_state[name] for name in ("images", "logits") if name in client.method_state}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        if not step.replay_samples:
            return 0.0
        old = match_output(client.method_state["old"], step.output)
        student_logits, teacher_logits = (
            mask_other_classes(step.forward_fn(step.replay_samples["images"]), old),
            mask_other_classes(step.replay_samples["logits"], old),
        )
        return (
            self.distillation_weight
            * step.replay_weight
            * distillation_loss(student_logits, teacher_logits, self.temperature).mean()
        )

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        # The server sends the images and logits again in each round.
        return {}

    def contribute_experience(self, client: Client, trained_state: State, data: Batch) -> State:
        client_round, ended_classes = client.client_round, client.server_state.get("ended")
        if ended_classes is None:
            return {}
        return {
            "ended": add_seen_classes(
                torch.zeros_like(ended_classes),
                torch.tensor(client_round.old_classes + client_round.new_classes, dtype=torch.long),
            )
        }

    def process_aggregate(self, server: Server) -> State:
        if not (self.is_generating and server.ends and server.server_state["ended"].any()):
            return {}
        with generator_training(server):
            images = self._make(server.module, server.server_state["ended"].nonzero()[:, 0])
        logits = predictions(server.module, server.state, images)
        server.server_state.update(
            {"images": images, "logits": logits, "ended": torch.zeros_like(server.server_state["ended"])}
        )
        return {}

    def _make(self, module: L.LightningModule, classes: Tensor) -> Tensor:
        """Return samples of some classes, shape (samples, ...), generated with the current model."""
        generator, image_batches = self.make_generator(module, noise_dim=256, width=self.width), list[Tensor]()
        learning = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
        while len(image_batches) * self.batch_size < self.num_images:
            noise = to_input(module, torch.randn(self.batch_size, generator.noise_dim)).requires_grad_()
            y = classes[torch.randint(len(classes), (self.batch_size,)).to(classes.device)]
            moving, nearest = torch.optim.Adam([noise], lr=0.01, betas=(0.5, 0.999)), torch.inf
            for _ in range(self.num_steps):
                images = generator(noise)
                logits, distance = with_statistics_distance(module, images)
                loss = 0.5 * F.cross_entropy(logits, y) + self.statistics_weight * distance
                if float(loss) < nearest:
                    nearest, best = float(loss), images.detach()
                take_step(loss, learning, moving)
            image_batches.append(best)
        return torch.cat(image_batches)[: self.num_images]
