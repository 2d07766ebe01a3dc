"""Training before the first round: pre-training, and the base session with a frozen backbone."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_fcl.data.batching import Collate
from lightning_fcl.data.datamodule_adapter import TRANSFER_HOOKS
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import check_no_transfer_hook, find_stream, get_callbacks, require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import as_file_error, regular_file
from lightning_fcl.methods.functional import evaluation_mode
from lightning_fcl.methods.replay import Replay
from lightning_fcl.models.quantization import freeze_backbone_
from lightning_fcl.rng import derive_seed, seed_all
from lightning_fcl.tasks.classification import Classifier
from lightning_fcl.tasks.ridge import RidgeClassifier
from lightning_fcl.validation import (
    above,
    at_least,
    check_arguments,
    one_of,
    require_package,
    validate_fields,
    validated,
)


class Pretrain(Callback):
    """Callback that trains the model on the stream's pre-training samples before the first round.

    The training uses a separate plain Trainer. If a fit is resumed from a checkpoint, this callback does nothing.

    Args:
        epochs: Number of passes over the samples, at least 1.

    Raises:
        ValueError: If ``epochs`` is below 1, or the stream has no samples for pre-training.

    Example:
        >>> Pretrain(epochs=50).epochs
        50
    """

    @check_arguments
    def __init__(self, epochs: int = 50) -> None:
        at_least(1, epochs=epochs)
        self.epochs = epochs

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        stream = require_stream(trainer)
        torch.manual_seed(derive_seed(stream.seed, "pretrain"))
        pupil = copy.deepcopy(pl_module)
        for hook in TRANSFER_HOOKS:
            if is_overridden(hook, stream):
                setattr(pupil, hook, getattr(stream, hook))
        with stream.samples.seeded(stream.plan.pretrain, "train", derive_seed(stream.seed, "pretrain")):
            fit_centralized(pupil, stream.pretrain_dataloader(), self.epochs, trainer, trainer.precision)
        pl_module.load_state_dict(pupil.state_dict())


def fit_centralized(
    module: L.LightningModule,
    loader: DataLoader[Any],
    epochs: int,
    parent_trainer: L.Trainer,
    precision: Any = "32-true",
    progress_label: bool = False,
) -> None:
    """Train a module in a separate plain Trainer on the device type of another Trainer. No files are written."""
    trainer = L.Trainer(
        accelerator=parent_trainer.strategy.root_device.type,
        devices=1,
        precision=precision,
        max_epochs=epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=progress_label,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step`|The 'train_dataloader' does not have")
        trainer.fit(module, loader)


# Maximum number of calibration images. Images of the base session come first.
_CALIBRATION = 256


@dataclass(eq=False)
class BaseSession(Callback):
    """Callback that trains the network centrally during setup, then freezes its backbone (Kröger et al., 2025).

    This base session is the session T0 of the paper. It has these steps:

    1. The whole network is trained on the stream's pre-training classes, with a temporary classifier.
    2. The whole network is trained on the classes of the base session, with a new classifier that starts at zero. The
       weights of later classes are not trained, so that all later classes start with the same weights.
    3. Batch normalization is folded, and the backbone is frozen. An int8 backbone is calibrated on at most 256 images:
       first the images of step 2, then the images of step 1. After that, only ``model.head`` is trained.

    A resumed fit and `Trainer.test` only change the structure of the network as in step 3, because the checkpoint
    contains the values. To upload only the head, set ``reductions={"model.backbone.*": "constant"}`` in the strategy.

    Args:
        pretrain_epochs: Number of passes over the pre-training samples. 0 skips step 1.
        epochs: Number of passes over the samples of the base session, at least 1.
        lr: Learning rate of both steps. The optimizer is AdamW with a cosine schedule to zero.
        weight_decay: Weight decay of AdamW.
        batch_size: Number of images per batch.
        augment: Whether images are randomly flipped horizontally, and shifted by up to 4 pixels.
        backbone: Precision of the frozen backbone: ``"int8"``, or ``"float"`` for fp32.
        precompute_latents: Whether the feature maps of the backbone are computed once for all samples, before the first
            round. The trained model is the same. `Replay` then stores feature maps.
        cache_dir: Folder that caches the trained network. Another run loads the network if its settings of steps 1 and
            2, its seed, its data, its initial network and its version of PyTorch are equal. None: no cache.

    Raises:
        ValueError: If an argument is out of range, the stream has no base session, or the network has no ``backbone``
            or no ``head``.

    Example:
        >>> BaseSession(epochs=60, backbone="int8").backbone
        'int8'
    """

    citations: ClassVar[tuple[str, ...]] = ("kroeger2025odfcl",)

    pretrain_epochs: int = validated(40, at_least, 0)
    epochs: int = validated(60, at_least, 1)
    lr: float = validated(2e-3, above, 0)
    weight_decay: float = 0.01
    # Batch normalization needs at least 2 samples.
    batch_size: int = validated(32, at_least, 2)
    augment: bool = True
    backbone: Literal["int8", "float"] = validated("int8", one_of, ("int8", "float"))
    precompute_latents: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        validate_fields(self)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks = get_callbacks(trainer)
        network, stream = self._network(pl_module, callbacks[: callbacks.index(self)]), find_stream(trainer)
        if stream is not None:
            # An earlier fit may have stored feature maps of a different network.
            stream.samples = stream.samples.raw_samples or stream.samples
        # An earlier fit of the same network, which this fit continues, has set this attribute in `freeze_backbone_`.
        if getattr(network, "frozen", False):
            return
        if stage != "fit" or trainer.ckpt_path is not None:
            self.freeze(network)
            return
        stream = self.check_stream(pl_module, callbacks[: callbacks.index(self)], stream)
        self._train(network, stream, trainer)
        images = stream.get_samples(
            np.concatenate([stream.plan.base_samples, self._samples(stream)[0]])[:_CALIBRATION]
        )[0]
        self.freeze(network, images)
        if isinstance(pl_module, RidgeClassifier):
            with evaluation_mode(network):
                pl_module.on_base_session(*stream.get_samples(stream.plan.base_samples))

    def check_stream(
        self, module: L.LightningModule, previous_callbacks: Sequence[Callback], stream: FederatedStream | None
    ) -> FederatedStream:
        """Return the stream. Raise ValueError if this callback cannot train the stream's base session.

        Args:
            module: The module to train.
            previous_callbacks: The callbacks before this one.
            stream: The Trainer's stream.
        """
        network = self._network(module, previous_callbacks)
        if stream is None or not len(stream.plan.base_samples):
            raise InvalidValueError(
                "Expected a `FederatedStream` with a base session as the Trainer's `datamodule`, as with "
                f'`scenario="odfcl"`, but got {stream}.',
                argument="datamodule",
                value=stream,
            )
        outputs = _classifier(network).out_features
        if outputs < stream.num_classes:
            raise InvalidValueError(
                "Expected the network's number of outputs to be at least the stream's number of classes, "
                f"{stream.num_classes}, but got {outputs}.",
                hint="Increase the network's `num_classes`.",
                argument="num_classes",
                value=outputs,
            )
        images = tuple(stream.get_samples(stream.plan.base_samples[:1])[0].shape[1:])
        takes = tuple(getattr(network, "input_shape", images))
        if images != takes:
            raise InvalidValueError(
                f"Expected images of the network's input shape {takes}, but got images of shape {images}.",
                hint="Set the network's `image_size` and `channels`, or the dataset's `size`.",
                argument="image_size",
                value=images,
            )
        check_no_transfer_hook(module, stream, type(self).__name__)
        return stream

    def _network(self, module: L.LightningModule, previous_callbacks: Sequence[Callback]) -> nn.Module:
        early = [type(c).__name__ for c in previous_callbacks if isinstance(c, Replay) and c.include_base]
        if self.precompute_latents and early:
            raise InvalidValueError(
                f"Expected `{early[0]}(include_base=True)` after `BaseSession(precompute_latents=True)` among the "
                f"callbacks, because `{early[0]}` then stores feature maps, but got `{early[0]}` before `BaseSession`.",
                hint=f"Put `{early[0]}` after `BaseSession` in `callbacks`.",
                argument="callbacks",
                value=early[0],
            )
        network = module.model if isinstance(module, Classifier | RidgeClassifier) else None
        if network is None or not {"backbone", "head"} <= dict(network.named_children()).keys():
            raise InvalidValueError(
                "Expected a `Classifier` or `RidgeClassifier` whose `model` has a `backbone` and a `head`, like "
                f"`DSICNet`, but got {'the task' if network is None else 'the model'} "
                f"`{type(module if network is None else network).__name__}`.",
                argument="model",
                value=type(network).__name__,
            )
        return network

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.precompute_latents:
            network: Any = pl_module.model
            stream = require_stream(trainer)
            stream.samples = stream.samples.map(network.latent, pl_module.device)

    def _samples(self, stream: FederatedStream) -> tuple[IntArray, int]:
        samples = stream.plan.pretrain if self.pretrain_epochs else stream.plan.pretrain[:0]
        return samples, len(stream.plan.class_order) - stream.num_classes if stream.plan.class_order is not None else 0

    def _train(self, network: nn.Module, stream: FederatedStream, outer: L.Trainer) -> None:
        """Run steps 1 and 2 of the base session, or load the trained network from the cache."""
        path = (
            Path(self.cache_dir) / f"{self._key(network, stream)}.safetensors" if self.cache_dir is not None else None
        )
        if path is not None and path.is_file():
            with as_file_error(
                path, "to be a complete base session", "Delete the file. The next fit trains the session again."
            ):
                network.load_state_dict(load_file(regular_file(path)))
            return
        samples, num_pretrain_classes = self._samples(stream)
        classifier, head = _classifier(network), network.get_submodule("head")
        with isolate_rng():
            seed_all(stream.seed, "base session")
            if len(samples):
                head.classifier = nn.Linear(classifier.in_features, num_pretrain_classes, dtype=classifier.weight.dtype)
                self._fit(
                    network, stream, samples, self.pretrain_epochs, stream.num_classes, num_pretrain_classes, outer
                )
            head.classifier = classifier
            nn.init.zeros_(classifier.weight)
            nn.init.zeros_(classifier.bias)
            classes = len(set(stream.y[stream.plan.base_samples].tolist()))
            self._fit(network, stream, stream.plan.base_samples, self.epochs, 0, classes, outer)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Other processes may write the same base session at the same time.
            write_atomic(path, save({name: value.contiguous() for name, value in network.state_dict().items()}))

    def _fit(
        self,
        network: nn.Module,
        stream: FederatedStream,
        indices: IntArray,
        epochs: int,
        first: int,
        classes: int,
        outer: L.Trainer,
    ) -> None:
        x, y = stream.get_samples(indices)
        loader = DataLoader(
            TensorDataset(x, y - first),
            self.batch_size,
            shuffle=True,
            drop_last=len(x) > self.batch_size,
            collate_fn=mirrored_and_shifted(tuple(x.shape[2:])) if self.augment else None,
        )
        pupil = _Pupil(network, classes, self.lr, self.weight_decay, epochs * len(loader))
        # A ridge classifier keeps its network in evaluation mode, so restore the mode after training.
        training = network.training
        network.train()
        fit_centralized(pupil, loader, epochs, outer, progress_label=outer.progress_bar_callback is not None)
        network.train(training).cpu()

    def freeze(self, network: nn.Module, images: Tensor | None = None) -> None:
        freeze_backbone_(network, self.backbone, images)

    def _key(self, network: nn.Module, stream: FederatedStream) -> str:
        digest = hashlib.sha256()
        arguments = (self.pretrain_epochs, self.epochs, self.lr, self.weight_decay, self.batch_size, self.augment)
        digest.update(repr((arguments, stream.seed, stream.num_classes, torch.__version__)).encode())
        for indices in (self._samples(stream)[0], stream.plan.base_samples):
            for tensor in stream.get_samples(indices):
                digest.update(tensor.numpy().tobytes())
        for name, value in network.state_dict().items():
            digest.update(name.encode())
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()[:32]


def mirrored_and_shifted(size: tuple[int, ...]) -> Collate:
    """Return a `collate_fn` that randomly flips each image horizontally, and shifts each image by up to 4 pixels."""
    v2 = require_package("torchvision.transforms.v2", "mirrors and shifts images")
    transform = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(size, padding=4)])
    return lambda items: default_collate([(transform(x), y) for x, y in items])


class _Pupil(Classifier):
    """A classifier that uses the network's first ``classes`` outputs, trained with AdamW and a cosine schedule to 0."""

    def __init__(self, network: nn.Module, classes: int, lr: float, weight_decay: float, steps: int) -> None:
        super().__init__(network, classes)
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : self.num_classes]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=self.weight_decay)
        cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / self.steps)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def _classifier(network: nn.Module) -> nn.Linear:
    head: Any = network.head
    if not isinstance(getattr(head, "classifier", None), nn.Linear):
        raise InvalidValueError(
            "Expected `model.head.classifier` to be an `nn.Linear`, as in `DSICNet`, but got "
            f"`{type(getattr(head, 'classifier', None)).__name__}`.",
            hint="Assign the last layer to `model.head.classifier`.",
            argument="model.head.classifier",
        )
    classifier: nn.Linear = head.classifier
    return classifier
