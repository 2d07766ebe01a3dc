"""MFCL: replay and distillation on synthetic samples, from a generator that the server trains without client data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.base import ReplaySamples
from lightning_fcl.methods.context import Client, Server, Step, strip_prefix
from lightning_fcl.methods.functional import predictions, to_input
from lightning_fcl.methods.generative import GenerativeMethod, generator_training, take_step
from lightning_fcl.methods.head_calibration import last_layer
from lightning_fcl.methods.method import class_mask, mask_other_classes, match_output, target_mask
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.teachers import (
    Once,
    models_before,
    old_classes,
    present_experiences,
    with_teacher,
    without_teacher,
)
from lightning_fcl.models.generator import batchnorm_layers, gaussian_divergence, with_statistics_distance
from lightning_fcl.validation import above, at_least, validated

# Size and standard deviation of the Gaussian filter in the authors' code.
_FILTER_SIZE, _FILTER_DEVIATION = 5, math.sqrt(2)


def class_entropy_loss(logits: Tensor) -> Tensor:
    """Return 1 minus the entropy of the mean prediction of a batch, divided by the largest possible entropy.

    The result is 0 if all classes have the same mean probability, and 1 if all samples have the same class. With only
    one class, the result is 0.

    Args:
        logits: Logits, shape (batch, classes).

    Example:
        >>> class_entropy_loss(torch.zeros(3, 2))
        tensor(0.)
    """
    if logits.shape[1] == 1:
        return logits.sum() * 0
    share = F.softmax(logits, dim=1).mean(dim=0).clamp(min=1e-30)
    return 1 + (share * share.log()).sum() / math.log(logits.shape[1])


def smoothness_loss(images: Tensor) -> Tensor:
    """Return the mean squared difference between images and the same images after a Gaussian filter.

    The filter has 5 x 5 weights and a standard deviation of the square root of 2 pixels. The borders are reflected. For
    samples other than images of at least 3 x 3 pixels, the result is 0.

    Args:
        images: Images, shape (batch, channels, height, width), or other samples.

    Example:
        >>> smoothness_loss(torch.ones(2, 3, 8, 8)) < 1e-9
        tensor(True)
    """
    if images.dim() != 4 or min(images.shape[2:]) < 3:
        return images.sum() * 0
    channels, margin = images.shape[1], _FILTER_SIZE // 2
    offsets = torch.arange(_FILTER_SIZE, dtype=images.dtype, device=images.device) - margin
    weights = (-offsets.square() / (2 * _FILTER_DEVIATION**2)).exp()
    kernel = (weights[:, None] * weights / weights.sum() ** 2).expand(channels, 1, _FILTER_SIZE, _FILTER_SIZE)
    return F.mse_loss(images, F.conv2d(F.pad(images, (margin,) * 4, mode="reflect"), kernel, groups=channels))


@dataclass(eq=False)
class MFCL(GenerativeMethod):
    """MFCL (Babakniya et al., 2023): replay and distill synthetic samples of a generator that the server trains.

    The task loss is replaced by ``CE_new + finetune_weight * CE_head + distillation_weight * KD``:

    - CE_new is the cross-entropy of real samples of new classes, among the new classes only.
    - CE_head is the cross-entropy of real and synthetic samples, among all classes so far. Its gradient changes only
      the last layer, because the features are detached.
    - KD is the mean squared difference of the logits of old classes. The last layer of the teacher computes both
      logits, from the student's and from the teacher's features. KD thus compares features, weighted by importance for
      the old classes. It uses real and synthetic samples.

    Do not add `MeanOutputLoss`, because CE_new already leaves out the logits of old classes.

    The teacher is the server's model from before the first client entered the newest experience. See
    `lightning_fcl.methods.teachers`. In the first experience, the loss is CE_new. The label of a synthetic sample is
    the old class that the teacher predicts.

    When a new experience begins, the server trains the generator on its model alone, for ``num_steps`` steps. The loss
    is the sum of four terms. The cross-entropy of the predictions has random labels: the largest of the first numbers
    of the noise vector. The other terms are ``entropy_weight * class_entropy_loss``, ``statistics_weight`` times the
    mean `gaussian_divergence` of the batch normalization layers, and ``smoothness_weight * smoothness_loss``. In each
    experience, a client downloads the generator's weights and the teacher once. At the start of each round, a client
    generates ``num_samples`` samples, from which each step draws ``batch_size`` samples. A client keeps no samples
    between rounds. It uploads the same tensors as in FedAvg. Samples can also be feature vectors instead of images.

    Deviations: the authors' code generates new samples in each step. It also divides the logits by 1,000 in the
    cross-entropy of the generator, and uses the predicted classes as labels. Here, real and synthetic samples are one
    batch for batch normalization, as in the code, but only real samples change the running statistics. The defaults are
    smaller than the authors' values for CIFAR-100: batches of 128, noise vectors of size 1,000, and a generator of
    width 64.

    Args:
        distillation_weight: Weight of KD (w_kd), at least 0.
        finetune_weight: Weight of CE_head (w_ft), at least 0. If this weight and ``distillation_weight`` are 0, the
            server trains no generator.
        num_samples: Number of synthetic samples that a client generates in each round, at least 1.
        batch_size: Number of synthetic samples in each step of clients and server, at least 2.
        num_steps: Number of generator steps in each experience, at least 1.
        lr: Learning rate of the generator, which is trained with Adam, above 0.
        noise_dim: Size of the generator's noise vectors, at least the number of classes.
        width: Width of the generator. See `Generator`.
        statistics_weight: Weight of the batch normalization statistics (w_bn), at least 0.
        entropy_weight: Weight of the entropy of the mean prediction (w_ie), at least 0.
        smoothness_weight: Weight of the smoothness of images (w_noise), at least 0.

    Raises:
        ValueError: If an argument is out of range, or the Trainer does not run a federation. Also if the samples are
            neither images nor vectors, or the module has no batch normalization statistics, no class logits or no
            linear last layer.
        TypeError: If the batches are not pairs.

    Example:
        >>> MFCL(batch_size=16).replay_batch_size
        16
    """

    citations: ClassVar[tuple[str, ...]] = ("babakniya2023mfcl",)

    needs: ClassVar[Needs] = Needs(
        labels=True,
        logits=True,
        tensors=True,
        federation_reason="it has no server that trains a generator. Use the strategy",
    )
    reductions: ClassVar[ReductionRules] = {"before.*": Once(), "generator.*": Once()}
    of_experience: ClassVar[tuple[str, ...]] = ("teacher.*",)

    distillation_weight: float = validated(0.1, at_least, 0)
    finetune_weight: float = validated(1.0, at_least, 0)
    num_samples: int = validated(256, at_least, 1)
    batch_size: int = validated(64, at_least, 2)
    num_steps: int = validated(100, at_least, 1)
    lr: float = validated(0.001, above, 0)
    noise_dim: int = validated(256, at_least, 1)
    width: int = validated(16, at_least, 1)
    statistics_weight: float = validated(50.0, at_least, 0)
    entropy_weight: float = validated(1.0, at_least, 0)
    smoothness_weight: float = validated(0.001, at_least, 0)

    @property
    def replay_batch_size(self) -> int:
        return self.batch_size

    @property
    def is_generating(self) -> bool:
        return self.distillation_weight > 0 or self.finetune_weight > 0

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().prepare(trainer, pl_module)
        if not self.is_generating:
            return
        if self.noise_dim < self._classes:
            raise InvalidValueError(
                f"Expected `noise_dim` to be at least the number of classes, {self._classes}, but got "
                f"{self.noise_dim}.",
                hint="Increase `noise_dim`, because the first numbers of the noise are the scores of the classes.",
                argument="noise_dim",
                value=self.noise_dim,
            )
        self._head = last_layer(pl_module)
        # The generator's random weights are replaced, so they must not change the random numbers of the fit.
        with torch.random.fork_rng(devices=[]):
            self._network = self.make_generator(pl_module, self.noise_dim, self.width).eval()

    def init_server_state(self, module: L.LightningModule) -> State:
        newest = present_experiences(module, 0)[-1:]
        if not (self.is_generating and newest > (0,) and old_classes(module)):
            return {}
        # Zeros: the server has trained no generator for the experience.
        untrained = {name: torch.zeros_like(value) for name, value in _floating(self._network).items()}
        return models_before(module, newest) | {
            f"generator.{newest[0]}.{name}": value for name, value in untrained.items()
        }

    def prepare_client_state(self, client: Client) -> StateSection:
        client_round, server_state = client.client_round, client.server_state
        classes_by_name = {"old": client_round.old_classes, "new": client_round.new_classes}
        masks = {name: class_mask(client_round.num_classes, each) for name, each in classes_by_name.items()}
        numbers = [int(name.split(".")[0]) for name in strip_prefix(server_state, "before")]
        if not numbers:
            return {**client.method_state, **masks}
        memory = with_teacher(client, max(numbers))
        weights = strip_prefix(server_state, f"generator.{max(numbers)}")
        if not any(value.any() for value in weights.values()):
            return {**memory, **masks}
        noise = to_input(client.module, torch.randn(self.num_samples, self.noise_dim, generator=client.generator))
        with torch.no_grad():
            images = functional_call(self._network, weights, (noise,))
        teacher = {**client.received_state, **strip_prefix(memory, "teacher")}
        return {**memory, **masks, "images": images, "logits": predictions(client.module, teacher, images)}

    def replay_samples(self, client: Client) -> ReplaySamples:
        return {name: client.method_state[name] for name in ("images", "logits") if name in client.method_state}

    def task_weight(self, client: Client) -> float:
        return 0.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        # `needs` requires labels.
        assert step.y is not None
        old, new = (match_output(client.method_state[name], step.output) for name in ("old", "new"))
        if not step.replay_samples:
            return _new_class_loss(step, step.output, step.y, old, new)
        images, teacher_logits = step.replay_samples["images"], step.replay_samples["logits"]
        teacher = {**step.received_state, **strip_prefix(client.method_state, "teacher")}
        # Real and synthetic samples are one batch, so that batch normalization uses the statistics of both.
        features, number = step.embed_fn(torch.cat([step.x, images])), len(step.y)
        weight, bias = ((step.params if name in step.params else step.received_state)[name] for name in self._head)
        # A client without replay samples has images of zeros, which must not change its statistics.
        has_images = torch.as_tensor(step.replay_weight, device=images.device) > 0
        output = torch.where(has_images, F.linear(features[:number], weight, bias), step.output)
        labels = torch.cat([step.y, mask_other_classes(teacher_logits, old).argmax(dim=1)])
        head_loss = _cross_entropy(F.linear(features.detach(), weight, bias), labels, old | new)
        targets = torch.cat([step.teacher_forward(teacher, step.x), teacher_logits])
        student = F.linear(features, *(teacher[name] for name in self._head))
        difference = ((student - targets).square() * old).sum(dim=1) / old.sum().clamp(min=1)
        replay_loss = self.finetune_weight * head_loss + self.distillation_weight * difference
        return _new_class_loss(step, output, step.y, old, new) + step.replay_weight * _mean(step, replay_loss, number)

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        round_names = {"old", "new", "images", "logits"}
        return {name: value for name, value in without_teacher(client).items() if name not in round_names}

    def process_aggregate(self, server: Server) -> State:
        current, following = (present_experiences(server.module, 0, offset)[-1:] for offset in (0, 1))
        classes = old_classes(server.module, round_offset=1)
        if not (self.is_generating and following > current and classes):
            return {}
        with generator_training(server):
            generator = self.make_generator(server.module, self.noise_dim, self.width)
            weights = strip_prefix(server.server_state, f"generator.{current[0]}")
            if any(value.any() for value in weights.values()):
                generator.load_state_dict(weights, strict=False)
            optimizer = torch.optim.Adam(generator.parameters(), lr=self.lr)
            for _ in range(self.num_steps):
                noise = to_input(server.module, torch.randn(self.batch_size, self.noise_dim))
                take_step(self.generator_loss(server.module, generator, noise, classes), optimizer)
        trained = {f"generator.{following[0]}.{name}": value for name, value in _floating(generator).items()}
        server.server_state.update(trained)
        return {}

    def generator_loss(
        self, module: nn.Module, generator: nn.Module, noise: Tensor, classes: tuple[int, ...]
    ) -> Tensor:
        """Return the loss of a generator for a batch of noise.

        Args:
            module: The module, in evaluation mode. Its output is class logits.
            generator: The generator.
            noise: Noise, shape (batch, noise_dim).
            classes: The classes of which the generator makes samples.
        """
        images = generator(noise)
        output, divergence = with_statistics_distance(module, images, gaussian_divergence)
        logits = output[:, list(classes)]
        return (
            F.cross_entropy(logits, noise[:, : len(classes)].argmax(dim=1))
            + self.entropy_weight * class_entropy_loss(logits)
            + self.statistics_weight * divergence / len(batchnorm_layers(module))
            + self.smoothness_weight * smoothness_loss(images)
        )


def _floating(module: nn.Module) -> State:
    """Return the floating-point tensors of a module's state, without counters of batches."""
    return {name: value.detach() for name, value in module.state_dict().items() if value.is_floating_point()}


def _new_class_loss(step: Step, output: Tensor, y: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return the mean cross-entropy of the samples of new classes, among the new classes.

    If the classes of the stream's experiences are unknown, this is the cross-entropy of all samples and classes.
    """
    losses = _cross_entropy(output, y, new | ~new.any())
    is_new = ~old[y]
    return step.mean(losses * is_new) / step.mean(is_new.to(losses)).clamp(min=1e-12)


def _cross_entropy(logits: Tensor, y: Tensor, classes: Tensor) -> Tensor:
    """Return the cross-entropy of each sample among some classes and the sample's own class."""
    return F.cross_entropy(mask_other_classes(logits, classes | target_mask(y, logits)), y, reduction="none")


def _mean(step: Step, values: Tensor, number: int) -> Tensor:
    """Return the mean of values of real and synthetic samples. The first ``number`` values are of real samples."""
    count = number if step.sample_weight is None else (step.sample_weight > 0).sum()
    synthetic = values[number:]
    return (count * step.mean(values[:number]) + synthetic.sum()) / (count + len(synthetic))
