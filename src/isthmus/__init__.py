"""Isthmus: KVCache-centric, disaggregated LLM serving. Importing this package loads no torch."""

__version__ = "0.1.0"
