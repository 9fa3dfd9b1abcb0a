"""transformers as a peer of the engine: its own fast path on the same model.

SDPA attention, a dynamic cache, logits of the last position only, and a bare decode loop (without `generate`, whose
checks would count against it). Greedy, like ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Transformers:
    name = "transformers"

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> Any:
        """One left-padded batch, as `generate` does it."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = None if bool(mask.all()) else mask
        out = self._model(ids, attention_mask=padded, position_ids=positions, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1].argmax(-1), mask, padded is not None

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], state: Any, steps: int) -> None:
        cache, tokens, mask, padded = state
        if (extra := cache.get_seq_length() - mask.shape[1]) > 0:
            cache.crop(-extra)  # back to the prompts, for another turn
        positions = torch.tensor([[len(p)] for p in prompts])
        for _ in range(steps):
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
            out = self._model(
                tokens[:, None],
                attention_mask=mask if padded else None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            tokens, positions = out.logits[:, -1].argmax(-1), positions + 1
