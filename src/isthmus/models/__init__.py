"""What a Hugging Face `config.json` says of a model: the one reader for what work costs and for the engine. Pure."""

from isthmus.models.families import read_model
from isthmus.models.fields import Fields
from isthmus.models.quantisation import Quantisation, read_quantisation
from isthmus.models.spec import (
    Attention,
    Delta,
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
    "Delta",
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
