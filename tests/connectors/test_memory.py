"""An arena of isthmus as the connector sees it, its own and the adapter's."""

from __future__ import annotations

from isthmus.live.store.arena import Arena, PeerArena, Shape
from isthmus_vllm.memory import Area


def filled(slot: int, layer: int) -> bytes:
    return bytes([slot * 16 + layer]) * 96


def test_a_tensor_over_an_arena_has_its_slices() -> None:
    arena = Arena(Shape(2, 96), 3)
    assert arena.handle is not None
    peer = PeerArena.attach(arena.handle)
    assert peer is not None
    own, theirs = Area(arena), Area(peer)
    places = [(slot, layer) for slot in range(3) for layer in range(2)]
    for slot, layer in places:
        own.bytes_SLX[slot, layer] = slot * 16 + layer
    assert all(bytes(peer.slice(*place)) == filled(*place) for place in places)
    assert all(bytes(theirs.bytes_SLX[place].tolist()) == filled(*place) for place in places)
    assert theirs.address(2, 1) == theirs.bytes_SLX[2, 1].data_ptr()
    arena.slice(1, 1)[:] = bytes(96)
    assert not theirs.bytes_SLX[1, 1].any()
