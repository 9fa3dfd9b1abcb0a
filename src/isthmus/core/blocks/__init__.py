"""What a KV block is: a named, sealed, immutable value.

The *name* says what the block must contain (model revision, KV layout, tenant salt, all tokens up to its
end); the *seal* says which bytes it does contain. Pure: no clock, no I/O, no torch.
"""

from isthmus.core.blocks.layout import MAX_SNAPSHOTS, KVLayout
from isthmus.core.blocks.names import BlockNamer, state_name, state_names
from isthmus.core.blocks.seals import SEAL_BYTES, seal

__all__ = ["MAX_SNAPSHOTS", "SEAL_BYTES", "BlockNamer", "KVLayout", "seal", "state_name", "state_names"]
