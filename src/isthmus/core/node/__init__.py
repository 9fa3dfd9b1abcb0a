"""Decides for one node: what becomes of an attempt, from its route to its last token, and of the blocks it keeps.

Pure: facts in, actions out. The live process and the simulator carry out the same actions of the same object.
"""

from isthmus.core.node.attempts import SEVERED_NS
from isthmus.core.node.node import TRANSFER_NS, Node

__all__ = ["SEVERED_NS", "TRANSFER_NS", "Node"]
