"""KV connector for stock vLLM 0.32: pages of KV blocks go to and come from the store of the Isthmus node beside it.

`connector` is the only module that imports vLLM, and none imports isthmus: the two meet over a Unix socket and shared
memory (`wire`, `memory`).
"""
