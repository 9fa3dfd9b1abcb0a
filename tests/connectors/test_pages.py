"""Pages of KV tensors: found, copied whole, sealed; what is in pieces is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.core.blocks import seal
from isthmus.live.store.arena import Arena, Shape
from isthmus_vllm.memory import Area
from isthmus_vllm.pages import page_view, pages_of

B, H, N, C = 6, 2, 4, 10


def lbnhc() -> Tensor:
    """[B, H, N, C], tokens before heads in memory."""
    return torch.randn(B, N, H, C).permute(0, 2, 1, 3)


def layers_of_one_allocation() -> list[Tensor]:
    """As vLLM makes them: views [B, H, N, C] of one allocation."""
    whole = torch.randn(3 * B * H * N * C + 16)[16:]
    return [
        whole[at * B * H * N * C :][: B * H * N * C].view(B, N, H, C).permute(0, 2, 1, 3) for at in range(3)
    ]


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.arange(4000.0).as_strided(shape, strides)


@pytest.mark.parametrize(
    "layer",
    [
        lbnhc(),
        torch.randn(B, H, N, C),
        torch.randn(B, N, C).to(torch.bfloat16),
        torch.randn(B, 3, H, N, C)[:, 1],  # blocks outside layers
        torch.randn(B, 1, N, C).transpose(1, 2),
    ],
    ids=["LBNHC", "LBHNC", "latent", "BLHNC", "one head"],
)
def test_a_view_has_each_pages_bytes(layer: Tensor) -> None:
    view = page_view(layer, B)
    before = layer.clone()
    assert view.shape == (B, layer[0].numel() * layer.element_size())
    view[2] = 0
    assert not layer[2].any()
    others = [block for block in range(B) if block != 2]
    assert torch.equal(layer[others], before[others])


def test_kernel_blocks_side_by_side_are_one_page() -> None:
    layer = lbnhc()
    view = page_view(layer, B // 2)
    view[1] = 0
    assert [bool(layer[block].any()) for block in range(B)] == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    "layer",
    [
        torch.randn(H, B, N, C).transpose(0, 1),  # heads outside blocks
        torch.randn(B, H, N, C + 2)[..., :C],
        torch.randn(B, H, N, 2 * C)[..., ::2],
        torch.randn(B, H, N + 1, C)[:, :, :N],
        strided((B, H, N, C), (H * N * C - C, N * C, C, 1)),  # blocks overlap
        strided((B, H, N, C), (0, N * C, C, 1)),
    ],
    ids=["LHBNC", "padded", "spread", "gaps", "overlap", "same"],
)
def test_pages_in_pieces_are_refused(layer: Tensor) -> None:
    with pytest.raises(ValueError, match="in pieces"):
        page_view(layer, B)


def test_kernel_blocks_that_lie_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="in pieces"):
        page_view(torch.randn(B, 3, H, N, C)[:, 1], B // 2)


@pytest.mark.parametrize("num_blocks", [0, 4, B + 1])
def test_a_wrong_number_of_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError):
        page_view(lbnhc(), num_blocks)


def test_layers_must_be_alike_and_apart() -> None:
    with pytest.raises(ValueError, match="different sizes"):
        pages_of([lbnhc(), torch.randn(B, H, N, C + 1)], B)
    layer = lbnhc()
    with pytest.raises(ValueError, match="share"):
        pages_of([layer, layer], B)
    with pytest.raises(ValueError, match="meta"):
        pages_of([torch.empty(B, H, N, C, device="meta")], B)


def test_a_block_goes_to_a_slot_and_back_byte_for_byte() -> None:
    source, target = layers_of_one_allocation(), layers_of_one_allocation()
    out, back = pages_of(source, B), pages_of(target, B)
    before = [layer.clone() for layer in target]
    staging = Area(Arena(Shape(out.num_layers, out.slice_bytes), 4))
    (seals,) = out.store([5], staging, [2], after=out.mark())
    assert list(seals) == [seal(bytes(staging.bytes_SLX[2, layer].tolist())) for layer in range(3)]
    assert back.fetch(staging, 2, 1, seals)
    back.settle()
    for ours, theirs, old in zip(source, target, before, strict=True):
        assert torch.equal(theirs[1], ours[5])
        assert torch.equal(theirs[2:], old[2:]) and torch.equal(theirs[0], old[0])


@pytest.mark.parametrize("layer", range(3))
def test_a_changed_byte_breaks_the_seal(layer: int) -> None:
    pages = pages_of(layers_of_one_allocation(), B)
    staging = Area(Arena(Shape(3, pages.slice_bytes), 1))
    (seals,) = pages.store([0], staging, [0], after=None)
    staging.bytes_SLX[0, layer, -1] ^= 1
    assert not pages.fetch(staging, 0, 1, seals)


def test_blocks_and_slots_are_within() -> None:
    pages = pages_of(layers_of_one_allocation(), B)
    staging = Area(Arena(Shape(3, pages.slice_bytes), 1))
    for block, slot in [(B, 0), (-1, 0), (0, 1), (0, -1)]:
        with pytest.raises(IndexError):
            pages.store([block], staging, [slot], after=None)
        with pytest.raises(IndexError):
            pages.fetch(staging, slot, block, (b"",) * 3)
