"""The OpenAI-compatible HTTP front of a cluster. The entry is `create_app`."""

from isthmus.live.gateway.app import create_app
from isthmus.live.gateway.backend import Backend, TokenStream
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.tokenizer import GatewayTokenizer

__all__ = ["Backend", "GatewaySettings", "GatewayTokenizer", "TokenStream", "create_app"]
