"""Placement policies: each a function of the cluster view and one request. Chosen by name in the config."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.conductor.events import RequestArrived
from isthmus.conductor.view import ClusterView, NodeView
from isthmus.types import Role

Placement = tuple[NodeView, NodeView]
"""(prefill node, decode node); the same node twice when the KV stays where it is computed."""

Policy = Callable[[ClusterView, RequestArrived], Placement | None]


def least_loaded(view: ClusterView, request: RequestArrived) -> Placement | None:
    """Prefill where the fewest tokens remain to be computed, counting this request's uncached ones.

    A cached prefix therefore attracts a request until the queue there costs more than it saves. Decode where
    the least context is held. Ties go to the node that joined first. None when no node, or pair, can take it.
    """
    length = request.num_tokens + request.max_tokens  # a later attempt prefills what was generated as well
    prefills, decodes, mixed = (
        [node for node in view.with_role(role) if node.capacity_tokens >= length]
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED)
    )
    candidates = (prefills if decodes else []) + mixed
    if not candidates:
        return None
    prefill = min(candidates, key=lambda node: _prefill_tokens_with(node, request))
    if prefill.role is Role.MIXED:
        return prefill, prefill
    if request.max_tokens == 1:  # nothing is left to decode: the KV need not move
        return prefill, prefill
    return prefill, min(decodes, key=lambda node: node.decode_tokens)


def _prefill_tokens_with(node: NodeView, request: RequestArrived) -> int:
    cached = node.cached_tokens(request.names, request.num_tokens)
    return node.prefill_tokens + request.num_tokens - cached


POLICIES: dict[str, Policy] = {"least_loaded": least_loaded}
