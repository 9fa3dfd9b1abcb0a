"""The reader of a model's Hugging Face `config.json`, for costs and for the engine. Pure."""

from isthmus.core.models.families import read_model
from isthmus.core.models.fields import Fields
from isthmus.core.models.quantisation import Quantisation, read_quantisation
from isthmus.core.models.spec import (
    Attention,
    DeltaRule,
    Dense,
    Experts,
    LatentAttention,
    LayerSpec,
    Lightning,
    ModelSpec,
    RopeSpec,
)

__all__ = [
    "Attention",
    "DeltaRule",
    "Dense",
    "Experts",
    "Fields",
    "LatentAttention",
    "LayerSpec",
    "Lightning",
    "ModelSpec",
    "Quantisation",
    "RopeSpec",
    "read_model",
    "read_quantisation",
]
