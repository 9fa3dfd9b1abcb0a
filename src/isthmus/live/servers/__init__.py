"""A stock vLLM server as a node: one process beside it, the adapter, which starts it or attaches to it.

    head ──StartAttempt─> adapter ──HTTP──> vLLM            tokens ──Outputs──> head
    vLLM ──KV events (ZMQ)──> adapter ──BlocksStored, BlocksEvicted──> head
    worker of vLLM <──Unix socket, shared memory──> adapter's store         with `transfer: pool` (connectors/vllm)

Loads no torch, and nothing of vLLM.
"""
