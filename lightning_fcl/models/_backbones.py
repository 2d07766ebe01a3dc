"""Bodies for `lightning_fcl.models.create_vit`, from timm and this package. Patch sizes depend on the image size.

Importing timm takes seconds, so each builder imports only the modules that it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_fcl.errors import UnknownNameError
from lightning_fcl.models._layers import check_blocks, check_image_size
from lightning_fcl.models.t2t_cvt import CvTBody, T2TBody
from lightning_fcl.validation import at_least, did_you_mean, require_package

Backbone = tuple[nn.Module, int]
"""A module that maps images to features, and the number of features."""

# Image size in pixels. Images of at least this size use the patches, strides and windows of the papers. Smaller images
# use the patches, strides and windows for 32 x 32 pixels.
LARGE = 112

# Arguments of the bodies that users cannot pass, because `create_vit` sets them or because they change the output.
_OURS = {
    *("img_size", "image_size", "in_chans", "channels", "num_classes", "global_pool", "device", "dtype"),
    *("distilled", "strict_img_size", "dynamic_img_size"),
    "tokens",
    *("use_conv", "stem_backbone", "stem_stride", "stem_type"),
}


def make_backbone(name: str, image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    """Return the body of a variant, and its number of features. A family's name selects the smallest variant.

    See `lightning_fcl.models.create_vit`.
    """
    variant = name.lower().replace("-", "_")
    variant = FAMILIES.get(variant, variant)
    if variant not in VARIANTS:
        names = sorted({*FAMILIES, *VARIANTS})
        raise UnknownNameError(
            f"Expected `name` to be one of {', '.join(names)} but got {name!r}.",
            hint=did_you_mean(variant, names),
            argument="name",
            value=name,
        )
    at_least(1, channels=channels)
    build, defaults = VARIANTS[variant]
    return build(image_size, channels, {**defaults, **options})


def vit_backbone(
    image_size: int,
    channels: int,
    patch_size: int = 4,
    width: int = 192,
    depth: int = 6,
    num_heads: int = 12,
    mlp_ratio: float = 4.0,
    tokens: bool = False,
) -> Backbone:
    """Return the body of `ViT` and its number of features. With ``tokens``, the body returns raw patch tokens.

    Raw patch tokens are the tokens before the final normalization, without a class token.
    """
    check_blocks(width, num_heads, depth, mlp_ratio)
    check_image_size("ViT", image_size, multiple=patch_size, min_size=2 * patch_size)
    bare: dict[str, Any] = {"global_pool": "", "class_token": False, "final_norm": False} if tokens else {}
    body: nn.Module = _timm("vision_transformer.VisionTransformer")(
        image_size,
        patch_size,
        channels,
        0,
        embed_dim=width,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
        **bare,
    )
    return body, width


def _vit(image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    options = {"patch_size": _choose(image_size, 4, 16), **options}
    return vit_backbone(image_size, channels, **_checked(vit_backbone, options))


def _cait(image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    options = {"patch_size": _choose(image_size, 4, 16), **options}
    check_image_size("CaiT", image_size, multiple=options["patch_size"], min_size=2 * options["patch_size"])
    return _build_timm("cait.Cait", options, img_size=image_size, in_chans=channels)


def _pit(image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    stride = options.get("stride", _choose(image_size, 2, 8))
    options = {"patch_size": 2 * stride, "stride": stride, **options}
    # At the minimum size, the stages have 5, 3 and 2 patches per side.
    check_image_size("PiT", image_size, multiple=stride, min_size=6 * stride)
    return _build_timm("pit.PoolingVisionTransformer", options, img_size=image_size, in_chans=channels)


def _pvt(image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    stride = _choose(image_size, 2, 4)
    check_image_size("PVT", image_size, multiple=8 * stride, min_size=16 * stride)
    options = {"sr_ratios": _choose(image_size, (4, 2, 1, 1), (8, 4, 2, 1)), **options}
    body, features = _build_timm("pvt_v2.PyramidVisionTransformerV2", options, in_chans=channels)
    body.patch_embed.proj.stride = (stride, stride)  # timm always uses the paper's stride of 4
    return body, features


def _swin(image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    patch, window = _choose(image_size, (2, 4), (4, 7))
    options = {"patch_size": patch, "window_size": window, "drop_path_rate": 0.0, **options}
    check_image_size("Swin", image_size, multiple=8 * options["patch_size"], min_size=16 * options["patch_size"])
    return _build_timm("swin_transformer.SwinTransformer", options, img_size=image_size, in_chans=channels)


def _levit(image_size: int, channels: int, options: dict[str, Any]) -> Backbone:
    levit, convolution = _timm("levit.Levit"), _timm("levit.ConvNorm")
    stride = _choose(image_size, 4, 16)
    # At the minimum size, the stages have 5, 3 and 2 positions per side.
    check_image_size("LeViT", image_size, multiple=stride, min_size=5 * stride)
    options = dict(_checked(levit, options))
    if stride == 4:
        width = options["embed_dim"][0]
        first, second = convolution(channels, width // 2, 3, 2, 1), convolution(width // 2, width, 3, 2, 1)
        options |= {"stem_backbone": nn.Sequential(first, nn.Hardswish(), second), "stem_stride": stride}
    body = LevitBody(levit(image_size, channels, 0, **options))
    return body, body.norm.num_features


class LevitBody(nn.Module):
    """timm's LeViT without its classifier, followed by batch normalization and average pooling.

    In evaluation mode, timm caches the attention biases until training mode is set. With this cache, new weights from a
    server or from `torch.func.functional_call` would be ignored, and a second backward pass and `copy.deepcopy` would
    fail. Therefore, the cache is cleared after each forward pass.
    """

    def __init__(self, levit: Any) -> None:
        super().__init__()
        self.levit = levit
        self.norm = nn.BatchNorm1d(levit.num_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (batch, features) from images of shape (batch, channels, height, width)."""
        try:
            tokens: Tensor = self.levit.forward_features(x)
        finally:
            for module in self.levit.modules():
                if hasattr(module, "attention_bias_cache"):
                    module.attention_bias_cache = {}
        normed: Tensor = self.norm(tokens.flatten(0, 1))
        return normed.view_as(tokens).mean(dim=1)


def _hierarchical(
    kind: type[CvTBody | T2TBody], small: dict[str, Any], image_size: int, channels: int, options: dict[str, Any]
) -> Backbone:
    body = kind(image_size, channels, **_checked(kind, {**_choose(image_size, small, {}), **options}))
    return body, body.features


_cvt = partial(_hierarchical, CvTBody, {"kernels": (3, 3, 3), "strides": (2, 2, 2)})
_t2t = partial(_hierarchical, T2TBody, {"splits": ((3, 2), (3, 2), (3, 1))})


def _timm(path: str) -> Any:
    module, name = path.split(".")
    return getattr(require_package(f"timm.models.{module}", "has this vision transformer"), name)


def _build_timm(path: str, options: dict[str, Any], **sizes: int) -> tuple[Any, int]:
    kind = _timm(path)
    body = kind(num_classes=0, **sizes, **_checked(kind, options))
    return body, body.num_features


def _choose(image_size: int, small: Any, large: Any) -> Any:
    return small if image_size < LARGE else large


def _checked(kind: Callable[..., object], options: dict[str, Any]) -> dict[str, Any]:
    option_names = [name for name in inspect.signature(kind).parameters if name not in _OURS]
    for name in options:
        if name not in option_names:
            raise UnknownNameError(
                f"Expected an option of {kind.__name__} ({', '.join(option_names)}), but got {name!r}.",
                hint=did_you_mean(name, option_names),
                argument=name,
            )
    return options


_CAIT = {"embed_dim": 192, "num_heads": 4, "init_values": 1e-5}
_PVT = {"depths": (2, 2, 2, 2), "num_heads": (1, 2, 5, 8)}

VARIANTS: dict[str, tuple[Callable[[int, int, dict[str, Any]], Backbone], dict[str, Any]]] = {
    "vit": (_vit, {}),
    "deit_tiny": (_vit, {"depth": 12, "num_heads": 3}),
    "deit_small": (_vit, {"width": 384, "depth": 12, "num_heads": 6}),
    "cait_xxs24": (_cait, {**_CAIT, "depth": 24}),
    "cait_xxs36": (_cait, {**_CAIT, "depth": 36}),
    "pit_ti": (_pit, {"base_dims": (32, 32, 32), "depth": (2, 6, 4), "heads": (2, 4, 8)}),
    "pit_xs": (_pit, {"base_dims": (48, 48, 48), "depth": (2, 6, 4), "heads": (2, 4, 8)}),
    "pit_s": (_pit, {"base_dims": (48, 48, 48), "depth": (2, 6, 4), "heads": (3, 6, 12)}),
    "pvt_v2_b0": (_pvt, {**_PVT, "embed_dims": (32, 64, 160, 256)}),
    "pvt_v2_b1": (_pvt, {**_PVT, "embed_dims": (64, 128, 320, 512)}),
    "levit_128s": (_levit, {"embed_dim": (128, 256, 384), "key_dim": 16, "num_heads": (4, 6, 8), "depth": (2, 3, 4)}),
    "levit_128": (_levit, {"embed_dim": (128, 256, 384), "key_dim": 16, "num_heads": (4, 8, 12), "depth": (4, 4, 4)}),
    "levit_192": (_levit, {"embed_dim": (192, 288, 384), "key_dim": 32, "num_heads": (3, 5, 6), "depth": (4, 4, 4)}),
    "swin_tiny": (_swin, {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}),
    "swin_small": (_swin, {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}),
    "cvt_13": (_cvt, {}),
    "cvt_21": (_cvt, {"depths": (1, 4, 16)}),
    "t2t_7": (_t2t, {}),
    "t2t_10": (_t2t, {"depth": 10}),
    "t2t_12": (_t2t, {"depth": 12}),
    "t2t_14": (_t2t, {"width": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}),
}

# The first variant of each family is the smallest. In reversed order, it is added last and replaces the other variants.
FAMILIES = {name.partition("_")[0]: name for name in reversed(VARIANTS)}
