"""examples/route, for Docker Compose and Kubernetes, says what Isthmus understands. Nothing here talks to either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from isthmus.cli.main import app
from isthmus.config import LimitsConfig, server_entry
from isthmus.live.gateway.passing import create_passing_app
from isthmus.live.gateway.settings import GatewaySettings
from tests.live.gateway.server import serving
from tests.live.gateway.test_passing import Backend

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "route"
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
}
POD = OBJECTS["Deployment", "isthmus-router"]["spec"]["template"]["spec"]
[ROUTER] = POD["containers"]
[VLLM] = OBJECTS["Deployment", "vllm"]["spec"]["template"]["spec"]["containers"]


def entrypoint() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(line))


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of `isthmus route`, as the command reads them."""
    command: Any = typer.main.get_command(app)
    context = command.make_context(arguments[0], arguments[1:])
    while isinstance(command, TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    assert "urls" in context.params, "no other verb"
    assert all(server_entry(url) == url for url in context.params["urls"])
    return dict(context.params)


@pytest.mark.parametrize("arguments", [SERVICES["router"]["command"], ROUTER["args"]], ids=["compose", "pod"])
def test_the_router_is_started_as_its_command_takes_it(arguments: list[str]) -> None:
    options = parsed([*entrypoint(), *arguments])
    assert options["host"] == "0.0.0.0", "a container is reached from outside"


def test_the_router_knows_the_services_of_compose() -> None:
    options = parsed([*entrypoint(), *SERVICES["router"]["command"]])
    assert sorted(options["urls"]) == [f"http://{name}:8000" for name in SERVICES if name != "router"]
    assert SERVICES["router"]["ports"] == ["127.0.0.1:8000:8000"], "without a key it is for this machine"
    build = SERVICES["router"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    devices = [
        each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, each in SERVICES.items()
        if name != "router"
    ]
    assert devices == [["0"], ["1"]], "a GPU of its own for each"


def test_the_router_finds_the_pods_and_may_ask_for_them() -> None:
    options = parsed([*entrypoint(), *ROUTER["args"]])
    labels = OBJECTS["Deployment", "vllm"]["spec"]["template"]["metadata"]["labels"]
    (port,) = VLLM["ports"]
    [(label, value)] = labels.items()
    assert list(options["urls"]) == [f"k8s://default/{label}={value}:{port['containerPort']}"]
    name = POD["serviceAccountName"]
    assert ("ServiceAccount", name) in OBJECTS
    binding, role = OBJECTS["RoleBinding", name], OBJECTS["Role", name]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "default"}]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]


@pytest.mark.parametrize("name", ["vllm", "isthmus-router"])
def test_services_select_the_pods_of_their_deployments(name: str) -> None:
    service, deployed = OBJECTS["Service", name]["spec"], OBJECTS["Deployment", name]["spec"]
    template = deployed["template"]
    assert service["selector"] == template["metadata"]["labels"] == deployed["selector"]["matchLabels"]
    [container], [port] = template["spec"]["containers"], service["ports"]
    assert port["port"] == container["ports"][0]["containerPort"] == 8000
    assert container["readinessProbe"]["httpGet"]["port"] == container["ports"][0]["name"]
    assert (service.get("clusterIP") == "None") == (name == "vllm")


def test_the_router_is_ready_while_a_server_is_and_alive_without_any() -> None:
    path = ROUTER["readinessProbe"]["httpGet"]["path"]
    assert set(ROUTER["livenessProbe"]) == {"tcpSocket"}, "no restart for want of servers"
    backend = Backend()
    with serving(create_passing_app(backend, GatewaySettings())) as url:
        assert httpx.get(f"{url}{path}", trust_env=False).status_code == 200
        backend.healthy = False
        assert httpx.get(f"{url}{path}", trust_env=False).status_code == 503


def test_there_is_time_to_drain() -> None:
    drain_s = LimitsConfig().drain_s
    assert POD["terminationGracePeriodSeconds"] > drain_s
    assert int(SERVICES["router"]["stop_grace_period"].removesuffix("s")) > drain_s


def test_keys_come_from_the_environment_that_is_read() -> None:
    assert SERVICES["router"]["environment"] == ["ISTHMUS_API_KEY"]
    assert [each["name"] for each in ROUTER["env"]] == ["ISTHMUS_API_KEY"]
    assert ROUTER["env"][0]["valueFrom"]["secretKeyRef"]["optional"], "without the secret it needs no key"
