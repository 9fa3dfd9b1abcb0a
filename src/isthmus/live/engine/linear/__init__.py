"""Layers whose memory of a sequence is a matrix a head instead of the KV of every token.

Two kinds, both a gated delta rule behind a short convolution: `gdn` (Gated DeltaNet, one decay a head) and `kda` (Kimi
Delta Attention, one decay a channel). A layer runs in three moves:

    inputs = gdn.inputs(layer, x_TN, kernels)              # all tokens of the batch at once
    out = step(layer, inputs[:R], state, slots_R, kernels)          # decodes: one token each of R requests
    out = advance(layer, inputs[first:last], state, slot, kernels)  # a run of tokens of one request
    y_TN = layer_output(layer, torch.cat(outs), inputs.gate_THV, kernels)

`step` and `advance` change the live states they are given; nothing else here keeps any.
"""

from __future__ import annotations

from isthmus.live.engine.linear.layer import (
    GatedDeltaNet,
    Inputs,
    KimiDelta,
    Recurrent,
    State,
    advance,
    layer_output,
    step,
)

__all__ = [
    "GatedDeltaNet",
    "Inputs",
    "KimiDelta",
    "Recurrent",
    "State",
    "advance",
    "layer_output",
    "step",
]
