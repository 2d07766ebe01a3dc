"""Vision transformers that are made for tasks to come: LVT, whose keys are learnt, and DyTox, with a token for each."""

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

_ABSENT = -1e4  # not -inf: a sample whose own task is absent still has a finite loss


class LVT(SplitViT):
    """The lifelong vision transformer (Wang et al. 2022, "LVT"), of the sizes and with the arguments of `ViT`.

    It is that transformer with `InterTaskAttention` in each block. As in Zuo et al. 2024, who compare it with FedViT
    at the same size: the paper's own has convolutions before it and between its three stages. And it has one
    classifier, `head`, where the paper has two: one that is trained on new tasks alone, and one that predicts and is
    trained on both, which remains. The loss is `lightning_fcl.callbacks.LVTMethod`'s.

    The body has 2,549,016 parameters by default, 10.20 MB in one direction at 4 bytes each: those of `ViT`, but for
    its six blocks of 421,092 (2,526,552), which have 111,168 of the attention (3 * (192 * 192 + 192)) and 13,284 keys
    and biases ((8 * 8 + 1) * 192 + 12 * (8 * 8 + 3)) each.

    Raises:
        ValueError: If patches do not divide the image, or heads the width; and as `SplitViT` does.

    Example:
        >>> model = LVT(num_classes=10)
        >>> sum(p.numel() for p in model.body.parameters())
        2549016
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

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
    """The body of `LVT`, whose arguments it has: patches, a class token, learnt positions, pre-norm blocks.

    The output is the class token.

    Raises:
        ValueError: If patches do not divide the image, or heads the width.

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
        """Features of images (batch, channels, height, width), shape (batch, width)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = with_class_token(self.class_token, tokens) + self.positions
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features


class InterTaskAttention(nn.Module):
    """Attention whose keys are learnt, not computed from the input (Wang et al. 2022, section 3, inter-task attention).

    ``softmax(q K^T / sqrt(d) + B) v`` in each head: queries q and values v come from the tokens, the key K of each
    token and the biases B are parameters, `external_key` and `external_bias`. B has a number for each distance of two
    patches, as in LeViT, and three more: for the class token's attention to patches, theirs to it, and its own to
    itself; it begins at 0, K with the variance of keys that a layer of 0.02 computes from normalised tokens.
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
        """Tokens (batch, tokens, width) from tokens of the same shape."""
        query, value = (split_heads(layer(tokens), self.num_heads) for layer in (self.query, self.value))
        key = self.external_key.expand(len(tokens), -1, -1, -1)
        bias = self.external_bias[:, self.offsets][None].to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key.to(query.dtype), value, attn_mask=bias)
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


def _offsets(side: int) -> Tensor:
    """Which bias belongs to a query (row) and a key (column): of two patches ``rows * side + columns`` apart."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    distances = (places[:, None] - places).abs()
    table = torch.full((1 + side * side, 1 + side * side), side * side)
    table[1:, 0] = side * side + 1
    table[0, 0] = side * side + 2
    table[1:, 1:] = distances[..., 0] * side + distances[..., 1]
    return table


class TaskAttention(nn.Module):
    """A block in which each task's token looks at itself and the patches (Douillard et al. 2022, eq. 3 to 6).

    The class attention of CaiT with a token per task: ``z = [token, patches]``; only the token asks and changes. All
    tokens go through it at once, yet none sees another: the result is that of one pass for each.
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
        """What each task sees, (batch, tasks, width), of tokens (tasks, width) and patches (batch, patches, width)."""
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
    """The model of Douillard et al. 2022, "DyTox", with the self-attention of a standard vision transformer.

    Patches and positions go once through ``depth`` self-attention blocks, the ``body``; one `TaskAttention` block, the
    ``decoder``, then looks at them with each task's token, and the task's head (norm and linear layer) gives the logits
    of the task's classes alone, eq. 7.

    A token belongs to a block of classes, not to the number that a client's experience has: in a federation whose
    clients have the tasks in orders of their own, the clients that learn a block share its token and head. The paper's
    model grows; here all slots are there from the start, so that all clients have the same state, and ``learnt`` tells
    which are in use. The logits of a slot that is not are a constant that wins against nothing, and nothing of it gets
    a gradient. `lightning_fcl.callbacks.DyToxMethod` marks tasks as learnt; while none is, all are in use.

    For each task there is also a divergence head, which has a logit for its classes and one for all earlier ones. At
    the defaults the body has 2,246,016 parameters, the decoder 444,864, and each task a head of 2,314 and a divergence
    head of 2,507.

    Args:
        tasks: The classes of each task; a number cuts ``num_classes`` into so many blocks of equal size, by number
            until a stream tells which (see `assign_classes`).
        num_classes: Number of classes.
        image_size: See `ViT`; and all else. The DyTox paper has a width of 384.

    Raises:
        ValueError: If patches do not divide the image, heads the width or tasks the classes, if a class belongs to no
            task or to two, or if a batch's images are of another size.

    Example:
        >>> model = DyTox(tasks=5, num_classes=10, patch_size=16, width=12, depth=1, num_heads=2)
        >>> model(torch.zeros(2, 3, 32, 32)).shape, len(model.tokens), model.blocks[1]
        (torch.Size([2, 10]), 5, (2, 3))
    """

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
                    hint="Use a divisor of `num_classes`, or give the classes of each task.",
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
        # Where each class's logit is among those of all heads side by side: clients' means of it are itself.
        self.register_buffer("position", _positions(tasks))
        # Above 0 for a task that anyone has begun: so it stays in any mean over clients.
        self.register_buffer("learnt", torch.zeros(len(tasks)))
        of_logit = torch.repeat_interleave(torch.arange(len(tasks)), torch.tensor(self.sizes))
        self.register_buffer("_task", of_logit, persistent=False)

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The classes of each task, in the order of its head's logits."""
        order = torch.split(torch.argsort(self.position), self.sizes)
        return tuple(tuple(block.tolist()) for block in order)

    def task_index(self, labels: Tensor) -> Tensor:
        """The task of each label, same shape."""
        tasks: Tensor = self._task[self.position[labels.to(self.position.device)]]
        return tasks

    def assign_classes(self, blocks: Sequence[Sequence[int]]) -> None:
        """Give the tasks, whose classes were cut by number, the blocks of classes that a stream tells."""
        if {frozenset(block) for block in blocks} == {frozenset(block) for block in self.blocks}:
            return
        if not self.cut or bool(self.learnt.any()) or [len(block) for block in blocks] != self.sizes:
            raise InvalidValueError(
                f"Expected the stream's tasks to be those of `DyTox`, {_short(self.blocks)}, but got {_short(blocks)}.",
                hint="Give `tasks` these blocks, or as many as the stream has, if all are of the same size.",
                argument="tasks",
                value=blocks,
            )
        _check_blocks(blocks, len(self.position))
        self.position.copy_(_positions(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (batch, channels, height, width), shape (batch, num_classes)."""
        embedded = self.embed(x)
        logits = torch.cat([head(embedded[:, task]) for task, head in enumerate(self.heads)], dim=1)
        present = (self.learnt > 0) | ~(self.learnt > 0).any()
        logits = torch.where(present[self._task], logits, _ABSENT)
        return logits[:, self.position]

    def embed(self, x: Tensor) -> Tensor:
        """What each task's head sees, shape (batch, tasks, width)."""
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
            f"Expected `tasks` to hold each of the {num_classes} classes once, and no task to be empty, but got "
            f"{_short(blocks)}.",
            hint="Put each class in one task, or change `num_classes`.",
            argument="tasks",
        )


def _positions(blocks: Sequence[Sequence[int]]) -> Tensor:
    return torch.argsort(torch.tensor([label for block in blocks for label in block]))


def _short(blocks: Sequence[Sequence[int]]) -> str:
    text = ", ".join(str(list(block)) for block in blocks[:3])
    return f"{text}{', ...' if len(blocks) > 3 else ''} ({len(blocks)} tasks)"
