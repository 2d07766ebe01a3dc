"""Vision transformers for continual learning: LVT with learned attention keys, and DyTox with a token for each task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models._backbones import vit_backbone
from lightning_fcl.models._layers import (
    Block,
    check_blocks,
    check_image_size,
    check_images,
    fast_attention,
    init_weights,
    make_mlp,
    split_heads,
    with_class_token,
)
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.models.vit import SplitViT

# Logit of a class whose task is not in use. Finite instead of -inf, so that samples of this class have a finite loss.
_ABSENT = -1e4


class LVT(SplitViT):
    """The lifelong vision transformer (Wang et al., 2022, "LVT"), with the width, depth and arguments of `ViT`.

    The model is a `ViT` with `InterTaskAttention` in each block. Zuo et al. (2024) also compare FedViT with an LVT that
    has the size of FedViT. The original LVT also has convolutions before the transformer and between its three stages.

    The original LVT has two classifiers: the first is trained only on new tasks, and the second is trained on all tasks
    and used for predictions. This model has only the second, `head`. `lightning_fcl.callbacks.LVTMethod` defines the
    loss.

    By default, the body has 2,549,016 parameters. An upload or a download of the body has 10.20 MB, at 4 bytes per
    parameter. Each of the six blocks has 421,092 parameters (2,526,552 in total). In each block, the attention's linear
    layers have 111,168 parameters (3 * (192 * 192 + 192)). The keys and biases have 13,284 parameters ((8 * 8 + 1) *
    192 + 12 * (8 * 8 + 3)). All other parameters are those of `ViT`.

    Raises:
        ValueError: If the patch size does not divide the image size, ``num_heads`` does not divide ``width``, or
            `SplitViT` raises an error.

    Example:
        >>> model = LVT(num_classes=10)
        >>> sum(p.numel() for p in model.body.parameters())
        2549016
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    citations = ("wang2022lvt",)

    def __init__(
        self,
        num_classes: int = 100,
        image_size: int = 32,
        patch_size: int = 4,
        width: int = 192,
        depth: int = 6,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        channels: int = 3,
    ) -> None:
        body = LVTBody(image_size, channels, patch_size, width, depth, num_heads, mlp_ratio)
        super().__init__(body, width, num_classes, image_size, channels)


class LVTBody(Serializable):
    """The body of `LVT`: patches, a class token, learned positions and pre-norm blocks.

    The arguments are those of `ViT`. The output is the class token.

    Raises:
        ValueError: If the patch size does not divide the image size, or ``num_heads`` does not divide ``width``.

    Example:
        >>> LVTBody(32, 3, patch_size=16, width=8, depth=1, num_heads=2)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        patch_size: int = 4,
        width: int = 192,
        depth: int = 6,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        check_blocks(width, num_heads, depth, mlp_ratio)
        check_image_size("LVT", image_size, multiple=patch_size, min_size=2 * patch_size)
        side = image_size // patch_size
        self.patches = nn.Conv2d(channels, width, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + side * side, width))
        self.blocks = nn.Sequential(
            *(Block(width, InterTaskAttention(width, num_heads, side), mlp_ratio) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.apply(init_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, width) of images (batch, channels, height, width)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = with_class_token(self.class_token, tokens) + self.positions
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features


class InterTaskAttention(nn.Module):
    """Attention with learned keys instead of keys computed from the input (Wang et al., 2022, section 3).

    Each head computes ``softmax(q K^T / sqrt(d) + B) v``. Queries q and values v are computed from the tokens. The keys
    K of all tokens and the biases B are the parameters `external_key` and `external_bias`. B has one number for each
    distance between two patches, as in LeViT. B has three more numbers: from the class token to patches, from patches
    to the class token, and from the class token to itself. B starts at 0. K is drawn with the standard deviation
    ``0.02 * sqrt(width)``. Keys that a linear layer computes would have this standard deviation, if its weights had the
    standard deviation 0.02 and its inputs were normalized.
    """

    offsets: Tensor

    def __init__(self, width: int, num_heads: int, side: int) -> None:
        super().__init__()
        check_blocks(width, num_heads)
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.external_key = nn.Parameter(torch.empty(num_heads, 1 + side * side, width // num_heads))
        self.external_bias = nn.Parameter(torch.zeros(num_heads, side * side + 3))
        self.register_buffer("offsets", _offsets(side), persistent=False)
        nn.init.trunc_normal_(self.external_key, std=0.02 * width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the transformed tokens. Input and output have shape (batch, tokens, width)."""
        query, value = (split_heads(layer(tokens), self.num_heads) for layer in (self.query, self.value))
        key = self.external_key.expand(len(tokens), -1, -1, -1)
        bias = self.external_bias[:, self.offsets][None].to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key.to(query.dtype), value, attn_mask=bias)
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


def _offsets(side: int) -> Tensor:
    """Return the index of the bias for each pair of a query (row) and a key (column).

    For two patches that are r rows and c columns apart, the index is ``r * side + c``. The indices that follow are for
    pairs with the class token.
    """
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    distances = (places[:, None] - places).abs()
    table = torch.full((1 + side * side, 1 + side * side), side * side)
    table[1:, 0] = side * side + 1
    table[0, 0] = side * side + 2
    table[1:, 1:] = distances[..., 0] * side + distances[..., 1]
    return table


class TaskAttention(nn.Module):
    """A block in which each task token attends to itself and to the patches (Douillard et al., 2022, eq. 3 to 6).

    This is the class attention of CaiT with one token per task: ``z = [token, patches]``. Only the token is a query and
    is updated. All task tokens are processed in one pass, but they do not attend to each other. Therefore, the result
    equals the result of one pass per task.
    """

    def __init__(self, width: int, num_heads: int = 12, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = make_mlp(width, mlp_ratio)
        self.apply(init_weights)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """Return embeddings (batch, tasks, width) from tokens (tasks, width) and patches (batch, patches, width)."""
        tasks, batch = len(tokens), len(patches)
        normed_tokens, normed_patches = self.norm1(tokens), self.norm1(patches)
        query, *of_tokens = (
            split_heads(layer(normed_tokens)[None], self.num_heads).expand(batch, -1, -1, -1)
            for layer in (self.query, self.key, self.value)
        )
        of_patches = (split_heads(layer(normed_patches), self.num_heads) for layer in (self.key, self.value))
        key, value = (torch.cat(both, dim=2) for both in zip(of_tokens, of_patches, strict=True))
        itself = torch.eye(tasks, dtype=torch.bool, device=tokens.device)
        allowed = F.pad(itself, (0, patches.shape[1]), value=True)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        result = tokens + self.proj(attended.transpose(1, 2).flatten(2))
        embedded: Tensor = result + self.mlp(self.norm2(result))
        return embedded


class DyTox(Serializable):
    """The model of DyTox (Douillard et al., 2022), with the self-attention of a standard vision transformer.

    The ``body`` processes patches and positions once, in ``depth`` self-attention blocks. Then the token of each task
    attends to the patches in the ``decoder``, a `TaskAttention` block. Each task has a head, which is a norm and a
    linear layer. The head computes the logits of the task's classes (eq. 7).

    A token belongs to a block of classes, not to the position of an experience in a client's sequence. If clients learn
    the tasks in different orders, all clients that learn a block share its token and head.

    The original model grows with each task. This model has the tokens and heads of all tasks from the start, so that
    all clients have the same state. The buffer ``learnt`` marks the tasks in use. The logits of all other tasks are a
    very low constant, so the gradients of these tasks' tokens and heads are 0. `lightning_fcl.callbacks.DyToxMethod`
    marks tasks as learned. While no task is marked, all tasks are in use.

    Each task also has a divergence head with one logit for each class of the task, and one logit for all earlier
    classes. By default, the body has 2,246,016 parameters, and the decoder has 444,864 parameters. For each task, the
    head has 2,314 parameters, and the divergence head has 2,507 parameters.

    Args:
        tasks: Classes of each task, or the number of tasks. For a number, the classes are split into consecutive blocks
            of equal size. A stream can replace these blocks (see `assign_classes`).
        num_classes: Number of classes.
        image_size: Height and width of the images in pixels. For this and the other arguments, see `ViT`. The paper
            uses ``width=384``.

    Raises:
        ValueError: If the patch size does not divide the image size, or ``num_heads`` does not divide ``width``. Also
            if ``tasks`` is a number that does not divide ``num_classes``, or a class does not belong to exactly one
            task. The forward pass raises ValueError if the images have a different size.

    Example:
        >>> model = DyTox(tasks=5, num_classes=10, patch_size=16, width=12, depth=1, num_heads=2)
        >>> model(torch.zeros(2, 3, 32, 32)).shape, len(model.tokens), model.blocks[1]
        (torch.Size([2, 10]), 5, (2, 3))
    """

    citations = ("douillard2022dytox",)

    position: Tensor
    learnt: Tensor
    _task: Tensor

    def __init__(
        self,
        tasks: int | list[list[int]] = 10,
        num_classes: int = 100,
        image_size: int = 32,
        patch_size: int = 4,
        width: int = 192,
        depth: int = 5,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.cut = isinstance(tasks, int)
        if isinstance(tasks, int):
            if tasks < 1 or num_classes < 1 or num_classes % tasks:
                raise InvalidValueError(
                    f"Expected `tasks` to divide `num_classes`={num_classes} but got {tasks}.",
                    hint="Use a divisor of `num_classes`, or pass a list with the classes of each task.",
                    argument="tasks",
                    value=tasks,
                )
            size = num_classes // tasks
            tasks = [list(range(first, first + size)) for first in range(0, num_classes, size)]
        _check_blocks(tasks, num_classes)
        self.input_shape = (channels, image_size, image_size)
        self.sizes = [len(block) for block in tasks]
        self.body, _ = vit_backbone(image_size, channels, patch_size, width, depth, num_heads, mlp_ratio, tokens=True)
        self.decoder = TaskAttention(width, num_heads, mlp_ratio)
        self.tokens = nn.ParameterList([nn.init.trunc_normal_(torch.empty(width), std=0.02) for _ in tasks])
        self.heads = nn.ModuleList([_head(width, size) for size in self.sizes])
        self.divergence = nn.ModuleList([_head(width, size + 1) for size in self.sizes])
        # Position of each class's logit in the concatenated logits of all heads. The buffer is equal on all clients, so
        # averaging does not change it.
        self.register_buffer("position", _positions(tasks))
        # Above 0 for a task that a client has started. A mean over clients is then also above 0.
        self.register_buffer("learnt", torch.zeros(len(tasks)))
        of_logit = torch.repeat_interleave(torch.arange(len(tasks)), torch.tensor(self.sizes))
        self.register_buffer("_task", of_logit, persistent=False)

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Classes of each task, in the order of the logits of the task's head."""
        order = torch.split(torch.argsort(self.position), self.sizes)
        return tuple(tuple(block.tolist()) for block in order)

    def task_index(self, labels: Tensor) -> Tensor:
        """Return the task index of each label, with the shape of the labels."""
        tasks: Tensor = self._task[self.position[labels.to(self.position.device)]]
        return tasks

    def assign_classes(self, blocks: Sequence[Sequence[int]]) -> None:
        """Replace the consecutive blocks of classes by the blocks of a stream. Do nothing if the blocks are the same.

        The order of the blocks and of the classes in a block is not compared.

        Raises:
            ValueError: If the model was created with explicit blocks or has learned tasks already. Also if the sizes of
                the blocks differ from the model's, or the blocks do not contain each class once.
        """
        if {frozenset(block) for block in blocks} == {frozenset(block) for block in self.blocks}:
            return
        if not self.cut or bool(self.learnt.any()) or [len(block) for block in blocks] != self.sizes:
            raise InvalidValueError(
                f"Expected the stream's tasks to have the classes of `DyTox`'s tasks, {_short(self.blocks)}, but got "
                f"{_short(blocks)}.",
                hint="Pass the stream's tasks as `tasks`. If all have the same size, you can pass their number.",
                argument="tasks",
                value=blocks,
            )
        _check_blocks(blocks, len(self.position))
        self.position.copy_(_positions(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, num_classes) of images (batch, channels, height, width)."""
        embedded = self.embed(x)
        logits = torch.cat([head(embedded[:, task]) for task, head in enumerate(self.heads)], dim=1)
        present = (self.learnt > 0) | ~(self.learnt > 0).any()
        logits = torch.where(present[self._task], logits, _ABSENT)
        return logits[:, self.position]

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of each task's head, shape (batch, tasks, width)."""
        check_images(x, self.input_shape)
        with fast_attention(x):
            embedded: Tensor = self.decoder(torch.stack(list(self.tokens)), self.body(x))
        return embedded


def _head(width: int, classes: int) -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))
    return head.apply(init_weights)


def _check_blocks(blocks: Sequence[Sequence[int]], num_classes: int) -> None:
    if sorted(label for block in blocks for label in block) != list(range(num_classes)) or not all(map(len, blocks)):
        raise InvalidValueError(
            f"Expected `tasks` to contain each of the {num_classes} classes once, and no empty task, but got "
            f"{_short(blocks)}.",
            hint="Put each class in exactly one task, or change `num_classes`.",
            argument="tasks",
        )


def _positions(blocks: Sequence[Sequence[int]]) -> Tensor:
    return torch.argsort(torch.tensor([label for block in blocks for label in block]))


def _short(blocks: Sequence[Sequence[int]]) -> str:
    text = ", ".join(str(list(block)) for block in blocks[:3])
    return f"{text}{', ...' if len(blocks) > 3 else ''} ({len(blocks)} tasks)"
