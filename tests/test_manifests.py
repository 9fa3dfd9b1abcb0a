"""The manifest for Kubernetes says what Isthmus understands. Nothing here talks to a cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml

from isthmus.cli.main import app
from isthmus.cli.models import bytes_folder
from isthmus.config import Config, api_key, cluster_token, key_digest, load_config
from isthmus.live.cluster.local import check_joining
from isthmus.live.gateway.app import create_app
from isthmus.live.gateway.settings import ApiKey, GatewaySettings
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from tests.live.gateway.fake import FakeBackend
from tests.live.gateway.server import serving

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "kubernetes" / "leaderworkerset.yaml"
PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf8")
OF_LWS = {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}
"""What a LeaderWorkerSet sets in its containers, of what is used here."""


OBJECTS: dict[str, dict[str, Any]] = {
    each["kind"]: each for each in yaml.safe_load_all(FILE.read_text(encoding="utf8"))
}
GROUP = OBJECTS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
[HEAD], [NODE] = (GROUP[f"{which}Template"]["spec"]["containers"] for which in ("leader", "worker"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Config:
    file = tmp_path_factory.mktemp("deployment") / "deployment.yaml"
    file.write_text(OBJECTS["ConfigMap"]["data"][file.name])
    return load_config(file, {"token": "as ISTHMUS_TOKEN says"})


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The verb and its options, as the command reads them."""
    assert arguments[0] == "isthmus"
    commands = typer.main.get_command(app)
    context = commands.make_context("isthmus", arguments[1:], resilient_parsing=False)
    name, command, rest = commands.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
    assert command is not None
    return str(name), command.make_context(name, rest, parent=context).params


def nodes_of(count: int, folder: Path) -> list[dict[str, Any]]:
    """The options of each worker's command, which its shell makes."""
    (folder / "isthmus").write_text('#!/bin/sh\nfor each in isthmus "$@"; do echo "$each"; done\n')
    (folder / "isthmus").chmod(0o755)
    found = []
    for index in range(1, count + 1):
        environment = {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "isthmus-0.isthmus.default"}
        environment |= {"HOSTNAME": f"isthmus-0-{index}", "PATH": f"{folder}:{os.environ['PATH']}"}
        said = subprocess.run(NODE["command"], env=environment, check=True, capture_output=True, text=True)
        verb, options = parsed(said.stdout.splitlines())
        assert verb == "node"
        found.append(options)
    return found


def test_the_deployment_can_be_joined(deployment: Config) -> None:
    check_joining(deployment)
    assert deployment.placement == "join" and deployment.host == deployment.join_host == "0.0.0.0"


def test_the_head_is_served_where_probe_and_service_look(deployment: Config) -> None:
    verb, options = parsed(HEAD["command"])
    assert verb == "serve" and {name for name, value in options.items() if value} == {"config"}
    ports = {port["name"]: port["containerPort"] for port in HEAD["ports"]}
    assert ports == {"http": deployment.port, "join": deployment.join_port}
    probe = HEAD["readinessProbe"]["httpGet"]
    assert probe["port"] == "http"
    service = OBJECTS["Service"]["spec"]
    assert [port["port"] for port in service["ports"]] == [deployment.port]
    assert (
        service["selector"]["leaderworkerset.sigs.k8s.io/name"]
        == OBJECTS["LeaderWorkerSet"]["metadata"]["name"]
    )
    keys = (ApiKey("default", bytes.fromhex(key_digest("sk-told"))),)
    app = create_app(
        FakeBackend(lambda job: ()), GatewayTokenizer.load(bytes_folder()), GatewaySettings(keys=keys)
    )
    with serving(app) as url:
        assert httpx.get(f"{url}{probe['path']}", trust_env=False).status_code == 200, "it shows no key"


def test_workers_are_the_nodes_that_the_head_waits_for(deployment: Config, tmp_path: Path) -> None:
    found = nodes_of(GROUP["size"] - 1, tmp_path)
    roles = deployment.roles
    assert Counter(each["role"] for each in found) == {
        "prefill": roles.prefill.count,
        "decode": roles.decode.count,
    }
    assert {each["join"] for each in found} == {f"isthmus-0.isthmus.default:{deployment.join_port}"}
    assert len({each["name"] for each in found}) == len(found)
    assert {str(each["config"]) for each in found} == {"/etc/isthmus/deployment.yaml"}


def test_only_what_is_known_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name["name"] for container in (HEAD, NODE) for name in container["env"]}
    assert given == {"ISTHMUS_TOKEN", "ISTHMUS_API_KEY"}
    for name in given:
        monkeypatch.setenv(name, "sk-told")
    assert cluster_token() == api_key("--api-key") == "sk-told"
    used = set(re.findall(r"\$\{?([A-Z_]+)", shlex.join(NODE["command"])))
    assert used == OF_LWS | {"HOSTNAME"}


@pytest.mark.parametrize("template", ["leaderTemplate", "workerTemplate"])
def test_every_file_is_in_a_volume(template: str, deployment: Config) -> None:
    spec = GROUP[template]["spec"]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    tls = deployment.tls
    files = [deployment.model, tls.certificate, tls.key, tls.authority, "/etc/isthmus/deployment.yaml"]
    assert all(any(str(file).startswith(f"{mount}/") for mount in mounts) for file in files)
    assert volumes[mounts["/etc/isthmus"]]["configMap"]["name"] == OBJECTS["ConfigMap"]["metadata"]["name"]


def test_there_is_time_to_drain_and_memory_for_what_nodes_keep(deployment: Config) -> None:
    assert GROUP["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"] > deployment.limits.drain_s
    assert GROUP["restartPolicy"] == "None", "a node alone is started again"
    memory = int(NODE["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert memory > deployment.engine.kv_memory + deployment.cache.dram
    assert int(NODE["resources"]["requests"]["cpu"]) == deployment.engine.threads


def test_the_page_makes_the_secrets_that_the_manifest_names() -> None:
    for variable in HEAD["env"]:
        key = variable["valueFrom"]["secretKeyRef"]
        assert re.search(rf"create secret generic {key['name']} .*--from-literal={key['key']}=", PAGE)
    (tls,) = [volume for volume in GROUP["workerTemplate"]["spec"]["volumes"] if volume["name"] == "tls"]
    line = re.search(rf"create secret generic {tls['secret']['secretName']} (.*)", PAGE)
    assert line is not None
    assert all(f"--from-file={name}" in line[1] for name in ("tls.crt", "tls.key", "ca.crt"))
