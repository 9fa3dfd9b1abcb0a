"""A decoder's layers as sums, while a `config.json` is read: what each kind of layer adds to the facts of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from isthmus.errors import ConfigError

# A windowed layer is counted as a fixed state when its window is at most this; a longer one as full attention,
# since the contexts served are then mostly inside the window. Both err on the slow side.
SHORT_WINDOW = 1024
_DELTA_CHUNK = 64  # tokens the linear-attention kernels work on at a time (Kimi Linear, section on complexity)
_STATE_BYTES = 4  # recurrent states are kept in float32 by SGLang and vLLM
_CONV_BYTES = 2  # convolution windows in bfloat16


class Heads(NamedTuple):
    """Of one kind of layers: query heads, KV heads, sizes of a query or key head and of a value head."""

    queries: int
    keys: int
    size: int
    value_size: int


class Layers:
    """Sums over layers while a config is read."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self._config = config
        self.architecture = architecture
        self.num_layers = self.count("num_hidden_layers")
        self.hidden = self.count("hidden_size")
        self.facts: dict[str, Any] = {
            "architecture": architecture,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "vocab_size": self.count("vocab_size"),
            "max_length": self.count("max_position_embeddings", self.count("model_max_length", 0)),
            "dense_params": 0,
            "kv_elements": 0,
            "attention_flops": 0,
            "window_elements": 0,
            "state_bytes": 0,
            "token_flops": 0,
            "kv_shards": 1,
        }

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number; null counts as absent. Without a default, the field is needed."""
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"config.json of {self.architecture}: {name!r} must be a whole number, not {value!r}"
            )
        return value

    def per_layer(self, name: str) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or len(values) != self.num_layers:
            raise ConfigError(
                f"config.json of {self.architecture}: {name!r} must list {self.num_layers} layers"
            )
        return values

    def heads(self, prefix: str = "") -> Heads:
        """`prefix`: of the fields that a kind of layers has for itself; without them it has those of the others."""

        def own(name: str, default: int | None = None) -> int:
            return self.count(prefix + name, self.count(name, default))

        queries = own("num_attention_heads")
        if not queries:
            raise ConfigError(f"config.json of {self.architecture}: 'num_attention_heads' must be above 0")
        size = own("head_dim", self.hidden // queries)
        return Heads(queries, own("num_key_value_heads", queries) or queries, size, own("v_head_dim", size))

    def add(self, num_layers: int = 1, **amounts: int) -> None:
        for name, amount in amounts.items():
            self.facts[name] += num_layers * amount

    def attention(
        self, num_layers: int, *, window: int = 0, gated: bool = False, heads: Heads | None = None
    ) -> None:
        """Grouped-query attention layers; `gated` ones also project an output gate of the queries' size."""
        queries, keys, size, value_size = heads or self.heads()
        kv_elements = keys * (size + value_size)
        outputs = queries * value_size * (2 if gated else 1)
        self.add(num_layers, dense_params=self.hidden * (queries * size + kv_elements + outputs))
        pair_flops = 2 * queries * (size + value_size)
        self.facts["kv_shards"] = keys
        if 0 < window <= SHORT_WINDOW:
            self.add(num_layers, window_elements=kv_elements * window, token_flops=pair_flops * window)
        else:
            self.add(num_layers, kv_elements=kv_elements, attention_flops=pair_flops)

    def latent_attention(self, num_layers: int, *, gated: bool = False) -> None:
        """Multi-head latent attention (DeepSeek-V2, section 2.1): one compressed KV vector for all heads.

        `gated` layers also project an output gate of the values' size.
        """
        heads, hidden = self.count("num_attention_heads"), self.hidden
        rank, query_rank = self.count("kv_lora_rank"), self.count("q_lora_rank", 0)
        nope, rope, value = (self.count(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries = heads * (nope + rope)
        params = query_rank * (hidden + queries) if query_rank else hidden * queries
        params += hidden * (rank + rope) + rank * heads * (nope + value)
        params += heads * value * hidden * (2 if gated else 1)
        self.add(
            num_layers,
            dense_params=params,
            kv_elements=rank + rope,
            attention_flops=2 * heads * (nope + rope + value),
        )
        self.facts.update(kv_shards=1, latent=True)

    def delta_attention(self, num_layers: int, heads: Heads, conv: int) -> None:
        """Gated DeltaNet and Kimi Delta Attention layers: a fixed state, work linear in the length.

        FLOP per token and value head: 6 d^2 + 3 C d + C^2 (Kimi Linear, equation 13), with the product of key and
        value size for d^2 and their mean for d. State: one matrix a value head of key size by value size, and the
        last `conv - 1` inputs of the short convolution. `heads.queries` are those of the values, `heads.keys` of the
        keys.
        """
        values, keys, size, value_size = heads.queries, heads.keys, heads.size, heads.value_size
        channels = 2 * keys * size + values * value_size
        chunked = 3 * _DELTA_CHUNK * (size + value_size) // 2 + _DELTA_CHUNK**2
        self.add(
            num_layers,
            dense_params=self.hidden * (channels + 2 * values * value_size),  # in, output gate, out
            token_flops=values * (6 * size * value_size + chunked),
            state_bytes=values * size * value_size * _STATE_BYTES + max(conv - 1, 0) * channels * _CONV_BYTES,
        )

    def lightning_attention(self, num_layers: int, heads: int, size: int) -> None:
        """Lightning attention: linear attention with a decay for each head, and no convolution.

        FLOP per token and head: 4 d^2 to update and read the d x d state, 4 C d within a chunk.
        """
        self.add(
            num_layers,
            dense_params=5 * self.hidden * heads * size,  # in, output gate, out
            token_flops=heads * (4 * size * size + 4 * _DELTA_CHUNK * size),
            state_bytes=heads * size * size * _STATE_BYTES,
        )

    def mlp(self, num_layers: int, intermediate: int, *, matrices: int = 3) -> None:
        self.add(num_layers, dense_params=matrices * self.hidden * intermediate)

    def experts(
        self, num_layers: int, total: int, active: int, intermediate: int, shared: int = 0, latent: int = 0
    ) -> None:
        """Mixture-of-experts layers; `shared` is the intermediate size of what every token goes through.

        `latent`: the size that routed experts work in, 0 for the hidden size; into it and back are dense matrices.
        """
        if not 0 < active <= total:
            raise ConfigError(
                f"config.json of {self.architecture}: {active} experts per token of {total} do not fit"
            )
        self.mlp(num_layers, shared)
        self.add(num_layers, dense_params=self.hidden * (total + 2 * latent))  # the router, in and out
        self.facts.update(
            moe_layers=num_layers,
            num_experts=total,
            experts_per_token=active,
            expert_params=3 * (latent or self.hidden) * intermediate,
        )
