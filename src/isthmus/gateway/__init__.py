"""The OpenAI-compatible HTTP front of a cluster. The entry is `create_app`."""

from isthmus.gateway.app import create_app
from isthmus.gateway.backend import Backend, TokenStream
from isthmus.gateway.settings import GatewaySettings
from isthmus.gateway.tokenizer import GatewayTokenizer

__all__ = ["Backend", "GatewaySettings", "GatewayTokenizer", "TokenStream", "create_app"]
