"""A node that takes another role while the cluster serves: it goes on in place, with the limits of its new role."""

from __future__ import annotations

import asyncio

from isthmus.config import Config
from isthmus.core.attempts import Become
from isthmus.core.conductor import RoleChanged, Route, Tell
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.types import Job, ModelCard, NodeId, RequestId, Role, Sampling
from isthmus.facts import NodeFacts, Sequences, rules_of
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from tests.memory_network import MemoryNetwork
from tests.tape import MemoryTape

RECIPE = Recipe("model", layout_of(16), 1000)
CURVE = Curve(kv_token_bytes=2048, num_layers=2, prefill_token_s=1e-6, decode_fixed_s=1e-5)
ROLES = {"p-0": Role.PREFILL, "p-1": Role.PREFILL, "d-0": Role.DECODE}


async def answer(head: Head, name: str, prompt: tuple[int, ...]) -> list[int]:
    job = Job(RequestId(name), prompt, 10, Sampling(temperature=0.0))
    return [generated.token async for batch in head.submit(job) for generated in batch]


async def serve() -> tuple[MemoryTape, list[list[int]], NodeProcess, dict[NodeId, Role]]:
    network, tape = MemoryNetwork(), MemoryTape()
    card = ModelCard("model", 1000, 1000, created_s=0)
    head = Head(rules_of(Config()), card, silence_s=30, rejoin_s=30, recorder=tape, network=network)
    join = await head.open("127.0.0.1", 0)
    nodes = {}
    for name, role in ROLES.items():
        facts = NodeFacts(NodeId(name), role, CURVE, 64, 16, token_budget=64, sequences=Sequences(4, 2, 4))
        options = NodeOptions(facts, join, transfer_s=30)
        engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
        nodes[name] = NodeProcess(engine, options, Runtime(network))
    async with asyncio.TaskGroup() as group:
        for node in nodes.values():
            group.create_task(node.run())
        await head.wait_for([NodeId(name) for name in ROLES])
        answers = [await answer(head, f"before-{index}", PROMPTS[index]) for index in range(4)]
        head._act(Tell(NodeId("p-1"), Become(Role.DECODE)), 0)
        while not any(isinstance(entry.event, RoleChanged) for entry in tape.entries):
            await asyncio.sleep(0.001)
        roles = {node: role for node, (role, *_) in head.nodes().items()}
        asked = [answer(head, f"after-{index}", PROMPTS[index]) for index in range(4)]
        answers += await asyncio.gather(*asked)
        await head.close()
    return tape, answers, nodes["p-1"], roles


PROMPTS = [tuple(range(start, start + 40 + start)) for start in (1, 60, 120, 180)]


def test_a_converted_node_decodes() -> None:
    tape, answers, node, roles = asyncio.run(asyncio.wait_for(serve(), 60))
    assert answers == 2 * [expected_tokens(RECIPE, prompt, 10) for prompt in PROMPTS]
    assert roles == {"p-0": Role.PREFILL, "p-1": Role.DECODE, "d-0": Role.DECODE}
    assert node.node.scheduler.limits.max_sequences == 2
    routes = [action for entry in tape.entries for action in entry.actions if isinstance(action, Route)]
    before, after = routes[:4], routes[4:]
    assert {route.prefill for route in before} == {"p-0", "p-1"} and {route.decode for route in before} == {
        "d-0"
    }
    assert {route.prefill for route in after} == {"p-0"} and {route.decode for route in after} == {"p-1", "d-0"}
