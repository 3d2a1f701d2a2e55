"""The command that has a running server serve other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher_scripts.jobs.__main__ import main
from tests.jobs.fake_gateway import fake_gateway
from tests.server.test_protection import certificates


def test_the_command_asks_with_the_key_of_an_admin(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_gateway(tmp_path) as (ready, bodies):
        assert main(["swap", str(ready), "new/model_repo", "--mode", "mixed"]) == 0
        assert main(["swap", str(tmp_path), "/exports/new", "--drain-timeout", "5"]) == 0
    first = {"checkpoint": str(tmp_path / "new/model_repo"), "mode": "mixed", "drain_timeout": 30.0}
    assert bodies == [first, {"checkpoint": "/exports/new", "mode": "drain", "drain_timeout": 5.0}]
    assert "tiny at node0:8001: fp_new, version 1; pause 0.010 s" in capsys.readouterr().out


def test_the_reason_of_the_gateway_is_printed(tmp_path: Path, capsys) -> None:
    with fake_gateway(tmp_path, "ffn_size is another one") as (ready, _):
        assert main(["swap", str(ready), "/exports/new"]) == 1
    assert "the weights were not exchanged: ffn_size is another one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "change"),
    [({}, "deploy.gateway.port"), ({"openai": "http://x/v1"}, "deploy.gateway.api_keys")],
)
def test_a_server_without_a_gateway_or_keys_says_what_to_change(
    tmp_path: Path, capsys, content, change
) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text(json.dumps(content))
    assert main(["swap", str(ready), "/exports/new"]) == 1
    assert change in capsys.readouterr().err


def test_a_certificate_that_the_system_does_not_trust(tmp_path: Path, capsys) -> None:
    pem = certificates(tmp_path)
    with fake_gateway(tmp_path, tls=(pem["server.pem"], pem["server.key"])) as (ready, bodies):
        line = ["swap", str(ready), "/exports/new"]
        assert main([*line, "--ca", pem["ca.pem"]]) == 0
        assert len(bodies) == 1
        capsys.readouterr()
        for ca, reason in (
            (None, "is not trusted: "),
            (pem["client.pem"], "is not trusted: "),
            (pem["names"], "cannot read the certificates: "),
            (str(tmp_path / "absent.pem"), "cannot read the certificates: "),
        ):
            assert main([*line, *(["--ca", ca] if ca else [])]) == 1
            error = capsys.readouterr().err
            assert reason in error and "change --ca" in error
        assert len(bodies) == 1
