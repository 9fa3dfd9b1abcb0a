from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.config import (
    DEFAULT_TENANT,
    ClusterConfig,
    Config,
    ReuseConfig,
    api_key,
    cache_dir,
    child_environment,
    cluster_token,
    keep_ray_to_itself,
    key_digest,
    load_config,
    parse_bytes,
    with_keys,
)
from isthmus.core.errors import ConfigError
from isthmus.core.reuse import SELECTIONS, SEMANTIC
from isthmus.core.types import Reuse
from isthmus.live.gateway.tools import FORMATS

# Adding an option means adding it here, and saying in the commit why it must exist.
OPTIONS = """
model served_model_name tool_format servers host port policy.name record placement join_host join_port token
ray.spread
links offload.routing offload.threshold offload.cache offload.control offload.convert offload.cool_down_s
offload.period_s
clusters.east.hardware clusters.east.gpus clusters.east.cost clusters.east.price
engine.kind engine.hardware engine.gpus engine.cost
engine.dtype engine.device engine.threads engine.block_size engine.kv_memory engine.token_budget
engine.prompt_batch engine.max_sequences engine.max_length engine.batches
engine.vllm.python engine.vllm.args engine.vllm.env engine.vllm.logs engine.vllm.attach
engine.vllm.sockets engine.vllm.transfer
scheduling.admission.name scheduling.order scheduling.chunking scheduling.partial_prefills
scheduling.reserve scheduling.load_limit
slo.ttft_ms slo.tbt_ms cache.dram cache.ssd cache.folder cache.share
network.node_gbps network.handover_gbps network.rtt_us network.connections network.resume_s
network.compression tls.mode tls.folder tls.certificate tls.key tls.authority
limits.max_requests limits.max_attempts limits.start_s limits.drain_s limits.silence_s limits.rejoin_s
limits.transfer_s limits.link_s limits.body_bytes limits.json_depth limits.messages limits.tools limits.preparing
limits.prepare_s limits.prepare_memory limits.grammar_bytes limits.grammar_s limits.grammar_memory
limits.grammars_memory limits.greeting_s limits.greetings limits.wait_s auth.keys auth.tenants auth.metrics
limits.timeout_s limits.header_bytes limits.headers limits.header_s limits.body_s limits.bodies limits.connections
https.certificate https.key cors.origins
auth.default.requests_per_s auth.default.tokens_per_s auth.default.burst_s auth.default.concurrent auth.default.weight
lending.policy lending.reserve lending.period_s
reuse.default reuse.tenants reuse.selector reuse.kept reuse.max_prompts reuse.min_tokens
""".split()
OPTIONS += [
    f"{cluster}roles.{role}.{option}"
    for cluster in ("", "clusters.east.")
    for role in ("prefill", "decode", "mixed", "attention")
    for option in ("count", "hardware", "gpus", "max_sequences", "kv_memory", "pipeline", "price")
]
TREE = Config.model_json_schema()


def kinds_of(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each option below a section, and which values its schema allows, none beside."""
    for name, found in section["properties"].items():
        if name == "clusters":  # of any name
            name, found = "clusters.east", found["additionalProperties"]
        kinds = [each for each in found.get("anyOf", [found]) if each.get("type") != "null"]
        kind = {**found, **(TREE["$defs"][kinds[0]["$ref"].split("/")[-1]] if "$ref" in kinds[0] else kinds[0])}
        if "properties" in kind:
            yield from kinds_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


KINDS = dict(kinds_of(TREE))
BOUNDS = {
    "minimum": (-1, "greater"), "ge": (-1, "greater"), "exclusiveMinimum": (0, "greater"), "gt": (0, "greater"),
    "maximum": (1, "less"), "le": (1, "less"), "exclusiveMaximum": (0, "less"), "lt": (0, "less"),
}  # fmt: skip
"""What is added to a bound so that it is passed, and what is asked for then."""


def nested(option: str, value: object) -> dict[str, Any]:
    name, _, rest = option.partition(".")
    return {name: nested(rest, value) if rest else value}


def test_the_list_of_options_is_frozen() -> None:
    assert sorted(KINDS) == sorted(OPTIONS)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ISTHMUS_API_KEY", "ISTHMUS_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "isthmus.yaml"


def complaints(file: Path, text: str | bytes) -> list[str]:
    """What a user reads, a line for each mistake, less the file's name that it begins with."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    lines = str(caught.value).split("\n")
    assert all(line.startswith(f"{file}:") for line in lines)
    return [line.removeprefix(f"{file}:") for line in lines]


def complaint(file: Path, text: str | bytes) -> str:
    """The one line that a user reads, less its place."""
    (line,) = complaints(file, text)
    return re.sub(r"^[0-9]+:", "", line).strip()


def loaded(file: Path, text: str, overrides: dict | None = None) -> Config:
    file.write_text(text)
    return load_config(file, overrides or {})


# What is right.


def test_no_file_and_an_empty_one_are_the_default(file: Path) -> None:
    config = load_config(None, {})
    assert config == loaded(file, "# nothing yet\n") == Config()
    assert (config.host, config.port, config.model) == ("127.0.0.1", 8000, None)
    roles = config.roles
    assert (roles.prefill.count, roles.decode.count, roles.mixed.count) == (1, 1, 0)
    for section, option in ((config, "port"), (config.engine, "block_size")):
        with pytest.raises(ValidationError):  # never written to
            setattr(section, option, 1)


@pytest.mark.parametrize(
    ("written", "option", "meant"),
    [
        ("cors: {origins: '*'}", "cors.origins", ("*",)),
        ("cors: {origins: [https://a.b, app://c]}", "cors.origins", ("https://a.b", "app://c")),
        ("cors: {origins: []}", "cors.origins", ()),
        ("roles: {prefill: 3}", "roles.prefill.count", 3),
        ("roles: {prefill: {count: 3}}", "roles.prefill.count", 3),
        ("offload: {threshold: auto}", "offload.threshold", None),
        ("engine: {cost: curve.yaml}", "engine.cost", "curve.yaml"),  # checked where it is used
        ("engine: {cost: {num_layers: 4}}", "engine.cost", {"num_layers": 4}),
        ("policy: mooncake", "policy.name", "mooncake"),
        ("policy: {name: own.py:own, slack: 2}", "policy.parameters", (("slack", 2.0),)),
        ("scheduling: {admission: {name: predictive, decode_s: 3}}", "scheduling.admission.name", "predictive"),
        ("lending: {policy: a.module:rule}", "lending.policy", "a.module:rule"),
        ("port: 010000", "port", 10_000),
        ("engine: {kv_memory: 2e9}", "engine.kv_memory", 2_000_000_000),
        ("engine: {token_budget: 1e3}", "engine.token_budget", 1000),
        ("engine: {max_length: 1_000}", "engine.max_length", 1000),
        ("limits: {wait_s: .5}", "limits.wait_s", 0.5),
    ],
)
def test_a_value_is_read_as_a_person_means_it(file: Path, written: str, option: str, meant: object) -> None:
    found: Any = loaded(file, written)
    for name in option.split("."):
        found = getattr(found, name)
    assert found == meant


@pytest.mark.parametrize(
    ("written", "roles"),
    [
        ("{mixed: 2}", (0, 0, 2)),
        ("{prefill: 2}", (2, 0, 0)),
        ("{prefill: {hardware: h200}, decode: 3}", (1, 3, 0)),
        ("{decode: , mixed: 2e0}", (0, 0, 2)),
        ("", (1, 1, 0)),
        ("{}", (0, 0, 0)),
    ],
)
def test_of_roles_that_are_not_named_there_are_no_nodes(
    file: Path, written: str, roles: tuple[int, ...]
) -> None:
    config = loaded(file, f"roles: {written}")
    assert tuple(getattr(config.roles, role).count for role in ("prefill", "decode", "mixed")) == roles


def test_where_a_text_is_asked_for_it_is_what_is_written(file: Path) -> None:
    config = loaded(
        file,
        f"model: 007\nserved_model_name: true\ntoken: 1e3\nreuse: {{tenants: {{no: exact, 1: chunks}}}}\n"
        f"auth: {{keys: [{{tenant: 0x1F, sha256: {'1' * 64}}}]}}\ncache: {{dram: 1GiB, folder: ~/kv}}\n"
        "engine: {kind: vllm, vllm: {args: [--max-num-seqs, 010], env: {A: 1.50, B: on}}}",
    )
    assert (config.model, config.served_model_name, config.token) == ("007", "true", "1e3")
    assert (config.auth.keys[0].tenant, config.auth.keys[0].sha256) == ("0x1F", "1" * 64)
    assert config.reuse.tenants.keys() == {"no", "1"} and config.cache.folder == "~/kv"
    assert config.engine.vllm.args == ("--max-num-seqs", "010")
    assert config.engine.vllm.env == {"A": "1.50", "B": "on"}


def test_an_empty_section_is_as_if_absent(file: Path) -> None:
    text = "scheduling:\n#  order: promise\nengine: {vllm: }\nray:\nlinks:\nauth: {keys: , tenants: }\nroles:"
    assert loaded(file, text) == Config()
    assert loaded(file, text).model_fields_set == {"engine", "auth"}
    clusters = loaded(file, "clusters: {east: , west: {roles: {mixed: 1}}}").clusters
    assert clusters["east"] == ClusterConfig()


def test_keys_with_x_are_for_anchors_and_notes(file: Path) -> None:
    text = (
        "x-node: &node {count: 2}\nroles: {x-why: tried, prefill: *node, decode: {<<: *node, count: 3}}\n"
        "reuse: {tenants: {x-tenant: exact}}"
    )
    config = loaded(file, text)
    assert (config.roles.prefill.count, config.roles.decode.count) == (2, 3)
    assert config.reuse.tenants.keys() == {"x-tenant"}  # a name is no key of ours
    assert complaint(file, "xnode: 1").startswith("unknown key 'xnode'")


def test_all_mistakes_are_told_at_once_each_with_its_line(file: Path) -> None:
    text = "prot: 1\nengine:\n  kv_memmory: 2\n  gpus: many\nlinks:\n- between: [a, b]\n- gbps: 1\n  rtt: 2\nport:\n"
    assert complaints(file, text) == [
        "1: unknown key 'prot'; did you mean 'port'?",
        "3: unknown key 'engine.kv_memmory'; did you mean 'kv_memory'?",
        "4: engine.gpus: Input should be a valid integer, unable to parse string as an integer (found 'many')",
        "6: links.0.gbps: is missing; give it",
        "7: links.1.between: is missing; give it",
        "8: unknown key 'links.1.rtt'; did you mean 'rtt_ms'?",
        "9: port: nothing is given; give a value, or leave the key out",
    ]
    said = complaints(file, "".join(f"zz{number}: 1\n" for number in range(100)))
    assert len(said) == 21 and said[-1] == " and 80 more"
    (said,) = complaints(file, "model: m\nscheduling:\n  chunking: tbt")
    assert said.startswith("3: scheduling.chunking: tbt keeps slo.tbt_ms"), (
        "of several options, the first named"
    )


def test_a_wrong_flag_is_blamed_on_the_command_line(file: Path) -> None:
    file.write_text("port: 1\nengine: {gpus: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"port": 70000, "engine.threads": 2})
    assert [line.split(":")[0] for line in str(caught.value).split("\n")] == ["command line", str(file)]
    with pytest.raises(ConfigError, match=r"^command line: port: .*65535"):
        load_config(None, {"port": 70000})
    said = r"^command line: unknown key 'engine.thread'; did you mean 'threads'\?"
    with pytest.raises(ConfigError, match=said):
        load_config(None, {"engine.thread": 2})


@pytest.mark.parametrize("section", ["engine", "roles"])
def test_a_flag_hides_no_mistake_of_the_file(file: Path, section: str) -> None:
    file.write_text(f"{section}: 5")
    with pytest.raises(ConfigError, match=rf":1: {section}: Input should be a valid dictionary .*\(found 5\)"):
        load_config(file, {"engine.threads": 2, "roles.prefill.count": 2})


@pytest.mark.parametrize(
    ("text", "flags", "counts"),
    [
        ("", {"prefill.count": 2}, (2, 1, 0)),
        ("roles:", {"decode.count": 3}, (1, 3, 0)),
        ("roles: {mixed: 2}", {"prefill.count": 1}, (1, 0, 2)),
        ("roles: {prefill: 2, decode: 2}", {"decode.count": 3, "decode.hardware": "h20"}, (2, 3, 0)),
        ("roles: {prefill: 2, decode: {count: 2}}", {"decode.hardware": "h20"}, (2, 2, 0)),
    ],
)
def test_a_flag_changes_one_value_of_a_role(
    file: Path, text: str, flags: dict[str, Any], counts: tuple[int, ...]
) -> None:
    roles = loaded(file, text, {f"roles.{name}": value for name, value in flags.items()}).roles
    assert (roles.prefill.count, roles.decode.count, roles.mixed.count) == counts
    assert roles.decode.hardware == flags.get("decode.hardware")


def test_flags_win_over_the_file_and_absent_flags_do_not(file: Path) -> None:
    text = "port: 9000\nmodel: tiny\nroles: {prefill: 2}\nengine: {block_size: 8}"
    flags = {"port": 9100, "model": None, "roles.prefill.count": 4, "engine.threads": 2}
    config = loaded(file, text, flags)
    assert (config.port, config.model, config.roles.prefill.count) == (9100, "tiny", 4)
    assert (config.engine.block_size, config.engine.threads) == (8, 2)
    assert config.engine.token_budget == Config().engine.token_budget
    assert flags["model"] is None and load_config(None, {"limits.max_requests": 5}).limits.max_requests == 5


@given(st.integers(0, 2**80))
def test_a_number_of_bytes_is_itself(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size}B") == size


def test_sizes_have_units_and_what_is_none_is_refused() -> None:
    for text, size in (
        ("512MiB", 512 << 20), ("512 mib", 512 << 20), ("512Mi", 512 << 20), ("1.5GB", 1_500_000_000),
        ("1.5g", 1_500_000_000), ("2k", 2000), ("2KiB", 2048), ("2e9", 2_000_000_000), (1e16, 10**16),
        ("1_000", 1000), ("1TiB", 1 << 40), (" 7 ", 7), (2.0, 2), ("9007199254740993", 2**53 + 1),
    ):  # fmt: skip
        assert parse_bytes(text) == size
    for text in ("", "much", "-1", "1.5.5", "12 apples", "1e999", True, None, [1], float("nan")):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(text)


def test_every_option_refuses_values_of_no_kind_bounds_and_words_of_its_own(file: Path) -> None:
    """Of each option by what the tree says of it."""
    for option, kind in KINDS.items():
        if not option.endswith(".cost"):
            said = complaint(file, repr(nested(option, {"no": "sense"})))
            assert said.startswith((f"{option}: ", f"{option}.no: ") if "tenants" in option else f"{option}: ")
        for bound in BOUNDS.keys() & kind.keys():
            step, asked = BOUNDS[bound]
            said = complaint(file, repr(nested(option, kind[bound] + step)))
            assert said.startswith((f"{option}: Input should be {asked} than", f"{option}: -1 is not a size"))
        for word in kind.get("enum", ()):
            said = complaint(file, repr(nested(option, f"{word}x")))
            assert said.startswith(f"{option}: Input should be '{kind['enum'][0]}'")
            assert f"did you mean '{word}'?" in said or option == "auth.metrics"  # of auth nothing is quoted
        if not option.endswith(".name"):
            near = option.rpartition(".")[2]
            said = complaint(file, repr(nested(f"{option}q", 1)))
            assert said == f"unknown key '{option}q'; did you mean {near!r}?"


VLLM = "engine: {kind: vllm}\ncache: {dram: 1GiB}\n"
ATTACH = "engine: {kind: vllm, vllm: {attach: 'http://h:1', sockets: /s"
TWO = "clusters: {east: {roles: {prefill: 1}, hardware: h200}, west: {roles: {prefill: 1, decode: 1}}}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("limits: {zzz: 1}", "unknown key 'limits.zzz'; valid: max_requests, max_attempts, body_bytes, json_depth, "),
        ("'a\\nb': 1", "unknown key"),
        ("1: 2", "unknown key '1'; valid: model, "),
        (TWO + "links: [{between: [east, west], gbps: 1, rtt: 3}]", "unknown key 'links.0.rtt'; did you mean 'rtt_ms'"),
        ("auth: {tenants: {acme: {weigth: 2}}}", "unknown key 'auth.tenants.acme.weigth'; did you mean 'weight'?"),
        # Values of no kind that an option has.
        ("port: 80.5", "port: Input should be a valid integer"),
        ("port: 1:30", "port: Input should be a valid integer, unable to parse string as an integer (found '1:30')"),
        ("limits: {drain_s: 30s}", "limits.drain_s: Input should be a valid number, unable to parse string as a number "
                                   "(found '30s'); write a number of seconds"),
        ("port: true", "port: Input should be a valid integer"),
        ("roles: {mixed: true}", "roles.mixed: Input should be a valid integer"),
        ("slo: {ttft_ms: .inf}", "slo.ttft_ms: Input should be a finite number (found inf)"),
        ("engine: {device: tpu}", "engine.device: String should match pattern"),
        ("engine: {kv_memory: lots}", "engine.kv_memory: 'lots' is not a size; write bytes or e.g. 512MiB"),
        ("engine: {cost: [5]}", "engine.cost: Input should be a valid string"),
        ("roles: {prefill: many}", "roles.prefill: Input should be a valid integer"),
        ("roles: {prefill: [1]}", "roles.prefill: Input should be a valid dictionary"),
        ("offload: {threshold: soon}", "offload.threshold: Input should be a valid integer"),
        ("reuse: {default: 1}", "reuse.default: Input should be 'exact', 'chunks' or 'semantic' (found 1)"),
        ("reuse: {tenants: {acme: chunk}}", "reuse.tenants.acme: Input should be 'exact', 'chunks' or 'semantic' "
                                            "(found 'chunk'); did you mean 'chunks'?"),
        ("reuse: {tenants: {\"a\\nb\": chunk}}", "'reuse.tenants.a\\nb': Input should be 'exact', 'chunks' or"),
        ("auth: {tenants: {acme: {concurrent: 0}}}", "auth.tenants.acme.concurrent: Input should be greater than"),
        *[(f"cors: {{origins: [{text}]}}", f"cors.origins: '{text}' is no origin; write SCHEME://HOST or ")
          for text in ("https://a.b/", "https://*.b", "a.b")],
        ("clusters: {a b: {}}", "clusters: 'a b' is no name"),
        ("clusters: {x-base: {roles: {mixed: 1}}}", "clusters: 'x-base' is no name"),
        # Policies, and their parameters.
        ("policy: best", "policy: no policy; valid: random, round_robin, least_loaded, sticky, local_aware, "),
        ("policy: isthmsu", "policy: no policy; did you mean 'isthmus'? (found 'isthmsu')"),
        ("policy: my.py:a b", "policy: no policy; valid: "),
        ("lending: {policy: greddy}", "lending.policy: no policy; valid: none, isthmus, or FILE.py:FUNCTION (found"),
        ("policy: {balancing_threshold: 2}", "policy.name: is missing; give it"),
        ("policy: {name: mooncake, balancing_threshold: -1}", "policy.balancing_threshold: Input should be greater"),
        ("scheduling: {admission: never}", "scheduling.admission: Input should be 'none', 'baseline', 'early'"),
        # Options that do not fit each other.
        ("scheduling: {chunking: tbt}", "scheduling.chunking: tbt keeps slo.tbt_ms, which is not given; give it"),
        ("scheduling: {partial_prefills: 2, order: promise}", "scheduling.partial_prefills: above 1 needs "
                                                              "scheduling.order: fcfs"),
        (TWO + "roles: {prefill: 1}", "roles: each of the clusters has its own"),
        (TWO + "links: [{between: [east, north], gbps: 1}]", "links: no cluster is named 'north'; there are east"),
        (TWO + "links: [{between: [east, east], gbps: 1}]", "links: east and east need one link, between two clusters"),
        (TWO + "links: [{between: [east, west], gbps: 1}, {between: [west, east], gbps: 1}]",
         "links: west and east need one link"),
        (TWO + "links: [{between: [east, west], gbps: 0}]", "links.0.gbps: Input should be greater than 0"),
        (TWO + "placement: ray\nlinks: [{between: [east, west], gbps: 1}]",
         "links: emulate: proxy joins nodes of one machine; with placement: ray give emulate: none"),
        ("placement: ray\nengine: {device: cuda:1}", "engine.device: with placement: ray write cuda, not cuda:1"),
        ("ray: {spread: strict}", "ray: only with placement: ray"),
        # vLLM's nodes.
        ("engine: {vllm: {python: python3}}", "engine.vllm: only with engine.kind: vllm"),
        ("engine: {kind: vllm}", "cache.dram: vLLM nodes hand KV over through it; give it, or"),
        ("engine: {kind: vllm, vllm: {transfer: nixl}}\ncache: {dram: 1GiB}", "cache: with engine.vllm.transfer: nixl"),
        ("engine: {kind: vllm, vllm: {transfer: nixl}}\nclusters: {a: {roles: {mixed: 1}}}",
         "engine.vllm.transfer: nixl does not cross clusters"),
        (VLLM + "lending: {policy: isthmus}", "lending.policy: vLLM nodes lend no KV memory"),
        (VLLM + "network: {compression: int8}", "network.compression: vLLM's KV is not ours to quantise"),
        ("engine: {kind: vllm, batches: 2}\ncache: {dram: 1GiB}", "engine.batches: vLLM plans its own batches"),
        ("engine: {kind: vllm, prompt_batch: 2}\ncache: {dram: 1GiB}", "engine.prompt_batch: vLLM plans its own"),
        (VLLM + "scheduling: {order: promise}", "scheduling.order: promise: vLLM plans its own batches; leave it out"),
        (VLLM + "slo: {tbt_ms: 50}\nscheduling: {chunking: tbt}", "scheduling.chunking: tbt: vLLM plans its own"),
        (VLLM + "scheduling: {partial_prefills: 2}", "scheduling.partial_prefills: vLLM plans its own batches"),
        ("engine: {kind: vllm, vllm: {attach: 'h:1', sockets: /s}}", "engine.vllm.attach: write http://HOST:PORT"),
        ("engine: {kind: vllm, vllm: {attach: 'http://h:1'}}", "engine.vllm: attach: give sockets too"),
        ("engine: {kind: vllm, vllm: {sockets: /s}}", "engine.vllm: sockets: only with attach"),
        (ATTACH.replace("/s", "'tcp://h'") + "}}", "engine.vllm: sockets: write a folder, or tcp://HOST:PORT"),
        (
            ATTACH.replace("/s", "'tcp://h:7'") + "}}",
            "engine.vllm: sockets: with transfer: pool server and node share memory through a folder",
        ),
        ("engine: {kind: vllm, vllm: {env: {a b: c}}}", "engine.vllm.env: 'a b' is no name of an environment variable"),
        (ATTACH + ", python: p}}", "engine.vllm: attach: python, args, env and logs are for a server that is started"),
        (ATTACH + "}}\ncache: {dram: 1GiB}", "engine.vllm.attach: one server is one node; for several give placement: "
                                             "join, and each its own file"),
        (VLLM + "roles: {attention: 1}", "roles.attention: vLLM nodes attend to nobody else's KV; leave it out"),
        (VLLM + "clusters: {a: {roles: {prefill: {count: 2, pipeline: 2}}}}",
         "clusters.a.roles.prefill.pipeline: vLLM nodes form no pipeline groups; leave it out"),
        *[
            (text, "gpus: with engine.vllm.transfer: pool a server has one GPU; use nixl for more")
            for text in (
                "engine: {kind: vllm, gpus: 2}\ncache: {dram: 1GiB}",
                VLLM + "roles: {decode: {count: 1, gpus: 2}}",
                VLLM + "clusters: {a: {gpus: 2, roles: {mixed: 1}}}",
            )
        ],
        ("engine: {kind: vllm, device: 'cuda:1'}\ncache: {dram: 1GiB}",
         "engine.device: vLLM nodes are each given a GPU; write cuda, not cuda:1"),
        (VLLM + "placement: ray", "engine.device: with placement: ray give cpu or cuda, so that Ray gives vLLM"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_key_and_what_is_valid(file: Path, text: str, expected: str) -> None:
    assert complaint(file, text).startswith(expected)


@settings(max_examples=40)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*Config.model_fields, "prefill", "count", "kv_memory", "x"]), inner),
    max_leaves=8,
))  # fmt: skip
def test_whatever_is_written_is_a_configuration_or_a_line_for_each_mistake(value: object) -> None:
    overrides = {"engine": value, "roles": value, "engine.kv_memory": value}
    for dotted, written in overrides.items():
        try:
            load_config(None, {dotted: written})
        except ConfigError as error:
            lines = str(error).split("\n")
            assert all(line.startswith("command line: ") for line in lines)


# The environment.


def test_kernels_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "isthmus"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/.cache/isthmus")


def test_the_token_of_a_node_started_by_hand_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cluster_token() is None
    monkeypatch.setenv("ISTHMUS_TOKEN", "secret")
    assert cluster_token() == "secret"
    assert "secret" not in child_environment(1).values()


def test_a_child_gets_our_environment_and_its_threads_and_of_ray_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RAY_JOB_ID", "SPT_NOENV", "PYTHONBREAKPOINT", "CUDA_VISIBLE_DEVICES", "SOMETHING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    environment = child_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["SOMETHING"] == "1"
    assert not [name for name in environment if name.startswith(("RAY", "SPT", "PYTHONB"))]


def test_ray_started_here_tells_nobody_unless_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_ray_to_itself()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    keep_ray_to_itself()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"


# API keys.

DIGEST = key_digest("sk-secret")
ACME = f"auth: {{keys: [{{tenant: acme, sha256: {DIGEST}}}]}}"


def test_keys_of_file_flags_and_environment_are_all_known(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key("--api-key") is None and with_keys(Config(), []).auth.keys == ()
    monkeypatch.setenv("ISTHMUS_API_KEY", "sk-environment")
    assert (api_key("--api-key"), api_key("--api-key", "sk-flag")) == ("sk-environment", "sk-flag")
    assert "ISTHMUS_API_KEY" not in child_environment(1)
    config = with_keys(loaded(file, ACME), ["sk-secret", "sk-flag", "sk-environment"])
    assert [(key.tenant, key.sha256) for key in config.auth.keys] == [
        ("acme", DIGEST),  # the file says whose it is
        (DEFAULT_TENANT, key_digest("sk-flag")),
        (DEFAULT_TENANT, key_digest("sk-environment")),
    ]
    for dump in (repr(config), config.model_dump_json(exclude_unset=True), str(config.model_dump())):
        assert DIGEST not in dump and "acme" not in dump


@pytest.mark.parametrize(
    "text",
    [
        "auth: sk-secret",
        "auth: [sk-secret]",
        "auth: {keys: sk-secret}",
        "auth: {keys: [sk-secret]}",
        "auth: {keys: [{tenant: acme, sha256: sk-secret}]}",
        "auth: {keys: [{tenant: 'sk-secret :', sha256: DIGEST}]}",
        "auth: {keys: [{tenant: acme, sha256: DIGEST, key: sk-secret}]}",
        "auth: {keys: [{tenant: acme, sha256: UPPER}]}",
        "token: [sk-secret]",
    ],
)
def test_a_complaint_about_keys_quotes_none(file: Path, text: str) -> None:
    said = complaint(file, text.replace("DIGEST", DIGEST).replace("UPPER", DIGEST.upper()))
    assert said.split(":")[0].removeprefix("unknown key ").strip("'").startswith(("auth", "token"))
    assert "sk-secret" not in said and DIGEST not in said.lower()


def test_a_key_has_one_tenant(file: Path) -> None:
    twice = ACME.replace("]", f", {{tenant: globex, sha256: {DIGEST}}}]")
    assert complaint(file, twice) == "auth: tenants 'acme' and 'globex' have the same key"
    assert len(loaded(file, ACME.replace("]", f", {{tenant: acme, sha256: {DIGEST}}}]")).auth.keys) == 2


@pytest.mark.parametrize("key", ["", " ", "sk secret", "sk-sécret", "sk\n", "x" * 513])
def test_what_no_header_can_carry_is_no_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_keys(Config(), [key])
    assert str(caught.value).startswith("--api-key: a key is") and (key.strip() or "?") not in str(caught.value)
    monkeypatch.setenv("ISTHMUS_API_KEY", key)
    with pytest.raises(ConfigError, match=r"^ISTHMUS_API_KEY: a key is"):
        api_key("--api-key")


# Whom prompts of others are reused for.


def test_tenants_choose_what_their_prompts_are_computed_with(file: Path) -> None:
    reuse = "\nreuse: {default: chunks, tenants: {acme: semantic, default: exact}}"
    config = with_keys(loaded(file, ACME + reuse), ["sk-flag"])
    assert (config.reuse.default, config.reuse.tenants) == (
        Reuse.CHUNKS,
        {"acme": Reuse.SEMANTIC, DEFAULT_TENANT: Reuse.EXACT},
    )
    told = config.model_dump_json(exclude_unset=True)
    assert "acme" not in told, "nodes need no tenants"
    assert Config.model_validate_json(told).reuse.default is Reuse.CHUNKS
    assert with_keys(loaded(file, "reuse: {default: semantic}"), []).reuse.default is Reuse.SEMANTIC


NOBODY = "without API keys nobody knows whose a request is; give auth.keys"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reuse: {tenants: {acme: semantic}}", f"reuse.tenants: {NOBODY}, or reuse.default for all"),
        ("auth: {tenants: {acme: {weight: 2}}}", f"auth.tenants: {NOBODY}"),
        ("auth: {default: {concurrent: 1}}", f"auth.default, auth.metrics: {NOBODY}"),
        ("auth: {metrics: tenants}", f"auth.default, auth.metrics: {NOBODY}"),
        (
            ACME + "\nreuse: {tenants: {default: exact}}",
            "reuse.tenants: 'default' has no key; tenants with keys: acme",
        ),
        (f"{ACME[:-1]}, tenants: {{amce: {{}}}}}}", "auth.tenants: 'amce' has no key; did you mean 'acme'?"),
    ],
)
def test_a_tenant_without_a_key_is_one_line(file: Path, text: str, expected: str) -> None:
    """Known only once all keys are there; who takes no notice of keys takes none of tenants."""
    config = loaded(file, text)
    with pytest.raises(ConfigError) as caught:
        with_keys(config, [])
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


# What tenants may ask for.


def test_a_tenant_has_its_own_limits_and_for_the_rest_the_default(file: Path) -> None:
    tenants = "tenants: {acme: {concurrent: 3, weight: 2}}, default: {concurrent: 9, requests_per_s: 0.5}"
    auth = with_keys(loaded(file, f"{ACME[:-1]}, {tenants}, metrics: tenants}}"), ["sk-flag"]).auth
    assert auth.metrics == "tenants"
    acme, other = auth.of("acme"), auth.of(DEFAULT_TENANT)
    assert (acme.concurrent, acme.requests_per_s, acme.weight) == (3, 0.5, 2.0)
    assert (other.concurrent, other.requests_per_s, other.weight) == (9, 0.5, 1.0)


def test_words_of_options_are_those_that_other_modules_know() -> None:
    assert {*get_args(ReuseConfig.model_fields["selector"].annotation), SEMANTIC.name} == SELECTIONS.keys()
    assert get_args(Config.model_fields["tool_format"].annotation) == ("auto", *FORMATS)
