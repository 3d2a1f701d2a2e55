"""A repository in an S3 bucket: Triton copies its models elsewhere and serves them unedited."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import engine_for, random_tensors
from tests.server.processes import running
from tests.server.repositories import export, text_config
from tests.server.requests import Client, generated, ids_request, text_rows

pytestmark = pytest.mark.usefixtures("tritonserver")
CONFIG = text_config(num_layers=1)  # so that there are fewer files
KEY_ID, SECRET = "AKIDTEST", "a-secret-of-the-test"


class Bucket:
    """An S3 server on this machine; `signers` are the key ids that requests were signed with."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        application = DomainDispatcherApplication(create_backend_app)
        self.signers: set[str] = set()

        def noting(environ: dict[str, Any], start_response: Any) -> Any:
            signed = environ.get("HTTP_AUTHORIZATION", "")
            self.signers.add(signed.partition("Credential=")[2].partition("/")[0])
            return application(environ, start_response)

        self._server = make_server("127.0.0.1", 0, noting, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def upload(self, folder: Path) -> str:
        """Copy a folder's files into a bucket; its address as Triton wants it."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="uploader",
            aws_secret_access_key="uploader",
        )
        client.create_bucket(Bucket="models")
        for path in folder.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "models", f"repo/{path.relative_to(folder)}")
        client.close()
        self.signers.clear()
        return f"s3://{self.endpoint}/models/repo"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = Bucket()
    yield bucket
    bucket.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = engine_for(CONFIG, random_tensors(CONFIG))
    yield engine
    engine.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("keys", "tp"), [("file", 1), pytest.param("environment", 2, marks=pytest.mark.slow)]
)
def test_a_repository_in_a_bucket(
    tmp_path: Path,
    bucket: Bucket,
    engine: Engine,
    keys: str,
    tp: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = export(tmp_path / "exported", CONFIG, tp=tp)
    address = bucket.upload(settings.model_repository)
    shutil.rmtree(tmp_path / "exported")
    more = {}
    if keys == "file":
        credentials = {"s3": {"": {"key_id": KEY_ID, "secret_key": SECRET, "region": "us-east-1"}}}
        (tmp_path / "keys.json").write_text(json.dumps(credentials))
        more["cloud_credentials"] = str(tmp_path / "keys.json")
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with running(tmp_path / "job", address, **more) as step:
        ready = step.wait_until_ready()
        assert ready["models"] == ["ensemble", "postprocessing", "preprocessing", "text", "tiny"]
        with Client(ready, "http") as client:
            answer = client.infer("tiny", **ids_request([(5, 6, 7)], 6))
            output_len = np.array([[4]], np.uint32)
            told = client.infer("ensemble", INPUT_0=text_rows("Hello"), INPUT_1=output_len)
        assert step.stop() == 0, step.err
        assert step.survivors() == []
        said = step.out + step.err
    wanted = engine.submit(GenerateRequest((5, 6, 7), 6)).result(60)
    assert generated(answer) == list(wanted.output_ids)
    assert told["OUTPUT_0"].shape == (1, 1, 1)
    assert bucket.signers == {KEY_ID}
    assert SECRET not in said
