"""Which KV of earlier prompts a request is computed with: what its header says, else its tenant's setting, else the
deployment's (docs/reuse.md)."""

from __future__ import annotations

from isthmus.core.errors import RequestError
from isthmus.core.types import ModelCard, Reuse
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.terms import REUSE, Terms


def reuse_of(terms: Terms, scored: str, settings: GatewaySettings, card: ModelCard) -> Reuse:
    """`scored`: what asks for log-probabilities of the prompt, whose tokens are then all computed; "" if nothing does.

    Raises RequestError where the header asks for more than can be done. Settings give way to that in silence: who did
    not ask is no worse off.
    """
    if terms.reuse is None:
        usual = settings.tenant_reuse.get(terms.tenant or "", settings.reuse)
        return Reuse.EXACT if scored or card.no_reuse else usual
    if terms.reuse is not Reuse.EXACT and card.no_reuse:
        raise RequestError(f"the header {REUSE!r} can only be exact here: {card.no_reuse}", param=REUSE)
    if terms.reuse is not Reuse.EXACT and scored:
        message = (
            f"{scored} and the header '{REUSE}: {terms.reuse}' contradict each other, since a prompt that is scored "
            "is computed whole: give one"
        )
        raise RequestError(message, param=REUSE)
    return terms.reuse
