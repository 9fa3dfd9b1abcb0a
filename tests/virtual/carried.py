"""What sessions between nodes really carried of KV, frame by frame, in the bytes of the nodes' cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from isthmus.core.blocks import KVLayout
from isthmus.core.cost.transfer import NONE, codec_speeds
from isthmus.core.node.letters import FetchRequest, HandoverSpan
from isthmus.core.types import NodeId, RequestId
from isthmus.lab.sim.node import SimNode
from isthmus.live.peers import messages


class Transfer(NamedTuple):
    """KV of one attempt, or of one fetch of its donors, from a node to another. `purpose`: handover, fetch (recalls
    are fetches, too), shipment (to a holder, or back)."""

    purpose: str
    source: NodeId
    target: NodeId
    key: RequestId


class Carried:
    """Counts frames that pass between nodes, which are known by their numbers. `layout`: of the whole model."""

    def __init__(self, nodes: Sequence[SimNode], layout: KVLayout) -> None:
        self._nodes, self._layout = nodes, layout
        self._wants: dict[tuple[int, int, RequestId], FetchRequest] = {}
        self._pulls: dict[tuple[int, int, RequestId], messages.Pull] = {}
        self._extents: dict[tuple[int, RequestId], HandoverSpan] = {}
        self._kv: Counter[Transfer] = Counter()  # payload in bytes; where that is encoded, what it was before
        self._states: Counter[Transfer] = Counter()  # of that, what is recurrent state
        self._codecs: dict[Transfer, str] = {}

    def offered(self, sender: int, key: RequestId, extent: HandoverSpan) -> None:
        self._extents[sender, key] = extent

    def add(self, sender: int, receiver: int, message: Any, size: int) -> None:
        """A message goes, with a payload of so many bytes."""
        layout, source, target = self._layout, self._nodes[sender].facts, self._nodes[receiver].facts
        purpose, states, codec, tokens = "", 0, NONE, 0
        match message:
            case FetchRequest():
                self._wants[sender, receiver, message.key] = message
            case messages.Pull():
                self._pulls[sender, receiver, message.key] = message
            case messages.HandoverSlices():
                extent, first = self._extents[sender, message.key], message.first_block * layout.block_size
                purpose, codec, tokens = "handover", extent.codec_at(first), message.stop - first
                states = tokens if extent.states <= first < extent.stop > extent.num_tokens else 0
            case messages.FetchedSlices():
                want = self._wants[receiver, sender, message.key]
                pull = self._pulls[receiver, sender, message.key]
                stop = pull.start + message.first + len(message.seals)
                kv = len(want.names) - (layout.state_blocks if want.whole else 0)
                tokens = len(message.seals) * layout.block_size
                states = min(max(0, stop - kv) * layout.block_size, tokens)
                purpose, codec = "fetch", pull.codec
            case messages.ShipmentSlices():
                purpose = "shipment"
        if not purpose:
            return
        transfer, width = Transfer(purpose, source.node, target.node, message.key), layout.token_bytes
        if codec == NONE:
            assert not tokens or size == tokens * width, "a payload is not of its tokens"
        self._kv[transfer] += (size if codec == NONE else tokens * width) - states * width
        self._states[transfer] += states * width
        if codec != NONE:
            self._codecs[transfer] = codec

    def bytes_moved(self) -> dict[Transfer, int]:
        """As the cost model says what so many tokens and states, in their codec, take."""
        layout, slots = self._layout, {node.facts.node: node for node in self._nodes}
        found = {}
        for transfer, payload in self._kv.items():
            node = slots[transfer.source]
            num_bytes = payload * node.cost.kv_token_bytes // (layout.token_bytes * layout.num_layers)
            codec = self._codecs.get(transfer, NONE)
            if codec != NONE:
                num_bytes = int(num_bytes * codec_speeds(node.facts.kv_dtype, layout.block_size)[codec].kept)
            if self._states[transfer]:
                num_states, rest = divmod(self._states[transfer], layout.state_blocks * layout.block_bytes)
                assert not rest, "a part of a state went alone"
                num_bytes += num_states * node.cost.state_bytes
            found[transfer] = num_bytes
        return found
