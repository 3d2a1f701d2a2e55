"""A model repository in a cloud storage, as far as the login side goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.settings import settings_text
from tests.login.conftest import Planner

REMOTE = "deploy.model_repository=s3://https://storage.example:9000/models/repo"
ONE = ("stages=[deploy]", REMOTE)


@pytest.mark.parametrize("cluster", ["interactive", "bcm"])
def test_the_address_reaches_the_server_and_keys_stay_in_their_file(
    plan: Planner, arguments: list[str], tmp_path: Path, cluster: str
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"s3": {"": {"secret_key": "hush"}}}')
    keys.chmod(0o600)
    chosen = (f"cluster_type={cluster}", f"deploy.server.cloud_credentials={keys}")
    made = plan("dry_run=True", *chosen, *ONE, *arguments)
    (deploy,) = made.stages
    assert deploy.settings.model_repository == "s3://https://storage.example:9000/models/repo"
    assert deploy.settings.cloud_credentials == str(keys)
    assert deploy.paths()[0] == keys
    assert "hush" not in settings_text(deploy.settings)
    assert deploy.step_gpus() is None  # how many ranks there are is not known here


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("cluster_type=bcm", "deploy.run.nodes=2"),
            "in a cloud storage is served on one node: each would fetch a copy of its own; got 2",
        ),
        (("deploy.server.cloud_credentials=/nowhere",), "the file of keys is not there"),
        (
            ("+env_vars.AWS_SECRET_ACCESS_KEY=hush",),
            "the value of AWS_SECRET_ACCESS_KEY would be written into scripts",
        ),
        (
            ("stages=[deploy,evaluate]",),
            "the tokenizer of a model in a cloud storage must be named; change evaluate.tokenizer",
        ),
    ],
)
def test_what_cannot_work_is_said(
    plan: Planner, arguments: list[str], overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan("cluster_type=interactive", *arguments, *ONE, *overrides)
    found = "\n".join(raised.value.problems or [str(raised.value)])
    assert says in found and "hush" not in found
