"""KV connector for stock vLLM 0.32: pages of KV blocks go to and come from the store of the Isthmus node beside it.

`connector` is the only module that imports vLLM. Of isthmus the connector has names and seals of blocks, the arena and
the messages, none of which loads what vLLM does not.
"""
