"""Kinds of input for the presets: a batch of text, of images, or of both, from a configuration and a generator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Token ids are bytes. 0 to 2 are padding, start and end; 0xF5 and up never occur in UTF-8, so images may use them.
FIRST_TEXT_ID, LAST_TEXT_ID = 3, 0xF4
IMAGE_IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


def text(config: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random bytes, each row its own label."""
    import torch

    last = min(LAST_TEXT_ID, config.get_text_config().vocab_size - 1)
    ids = torch.randint(FIRST_TEXT_ID, last + 1, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def text_and_patches(config: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One still image per row, as flattened patches; its four merged tokens follow the first text token."""
    import torch

    vision = config.vision_config
    side = 2 * vision.spatial_merge_size
    tensors = _text_around(4, config, batch, length, generator)
    values_per_patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        **tensors,
        "mm_token_type_ids": (tensors["labels"] == -100).long(),
        "pixel_values": torch.randn(batch * side * side, values_per_patch, generator=generator),
        "image_grid_thw": torch.tensor([[1, side, side]]).repeat(batch, 1),
    }


def text_and_pixels(config: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One whole image per row; its four merged tokens follow the first text token."""
    import torch

    vision = config.vision_config
    side = 2 * config.spatial_merge_size * vision.patch_size
    tensors = _text_around(4, config, batch, length, generator)
    tensors["pixel_values"] = torch.randn(batch, vision.num_channels, side, side, generator=generator)
    return tensors | {"image_sizes": torch.tensor([[side, side]]).repeat(batch, 1)}


def _text_around(
    tokens: int, config: Any, batch: int, length: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Text with image tokens after its first one."""
    if length < tokens + 2:
        raise ValueError(f"length {length} is too short for {tokens} image tokens with text before and after them")
    tensors = text(config, batch, length, generator)
    tensors["input_ids"][:, 1 : 1 + tokens] = config.image_token_id
    tensors["labels"][:, 1 : 1 + tokens] = -100
    return tensors


def pixels(config: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Whole images for a vision encoder; there are no tokens, so `length` has no meaning."""
    import torch

    return {"pixel_values": torch.randn(batch, config.num_channels, *config.image_size, generator=generator)}


def patches(config: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Images as patches and their positions, for a vision encoder that pools them."""
    import torch

    side = 2 * config.pooling_kernel_size
    positions = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    values = torch.randn(batch, side * side, 3 * config.patch_size**2, generator=generator)
    return {"pixel_values": values, "pixel_position_ids": positions.repeat(batch, 1, 1)}
