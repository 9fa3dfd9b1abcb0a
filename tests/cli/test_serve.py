"""What `isthmus serve` puts together, and says, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.serve import assemble, say_if_exact, say_if_mute
from isthmus.config import Config, load_config, with_keys
from isthmus.core.types import Reuse
from isthmus.live.cluster.launcher import LocalLauncher
from isthmus.live.gateway import GatewaySettings, GatewayTokenizer
from tests.live.gateway import folder

from .conftest import Command

SEMANTIC = {"reuse.default": "semantic"}
ONE = {"reuse.tenants": {"default": "chunks", "acme": "exact"}}
SAID = "isthmus: reuse stays exact, whatever the section reuse says: why not\n"


def test_why_a_setting_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, why, said in (
        (SEMANTIC, "why not", SAID),
        (ONE, "why not", SAID),
        ({}, "why not", ""),
        ({"reuse.tenants": {"acme": "exact"}}, "why not", ""),
        (SEMANTIC, "", ""),
    ):
        say_if_exact(load_config(None, overrides), why)
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(("shown", "said"), [("role", "shows nothing of what users say"), ("content", "")])
def test_a_template_that_shows_no_contents_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: str, said: str
) -> None:
    template = {"chat_template": f"{{% for m in messages %}}{{{{ m.{shown} }}}}{{% endfor %}}"}
    say_if_mute(GatewayTokenizer.load(folder.write(tmp_path, tokenizer_config=template)))
    err = capsys.readouterr().err
    assert said in err and bool(err) == bool(said)


def test_what_tenants_chose_reaches_the_gateway(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[GatewaySettings] = []
    monkeypatch.setattr("isthmus.live.gateway.app.create_app", lambda *parts: given.append(parts[2]))
    emulated = {"engine.kind": "emulated", "engine.hardware": "h200", "engine.kv_memory": "64MiB"}
    config: Config = load_config(
        None, {**emulated, **ONE, "auth.keys": [{"tenant": "acme", "sha256": "0" * 64}]}
    )
    assemble(with_keys(config, ["sk-own"]), LocalLauncher())
    [settings] = given
    assert (settings.reuse, settings.tenant_reuse["default"]) == (Reuse.EXACT, Reuse.CHUNKS)
    said = capsys.readouterr().err
    assert said.count("reuse stays exact") == 1 and "the emulated engine has no KV that could be moved" in said


def test_insecure_is_a_mode_of_tls(isthmus: Command, tmp_path: Path) -> None:
    file = tmp_path / "files.yaml"
    file.write_text("tls: {folder: kept}")
    status, _, said = isthmus("serve", "--insecure", "--config", file)
    assert (
        status == 2 and "tls: mode: none leaves sessions plain; give no files and no folder beside it" in said
    )
