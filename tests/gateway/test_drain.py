"""A gateway that is stopped while answers take longer than it may wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.processes import gateway
from tests.lazy_modules import LazyModule
from tests.processes import wait_for
from tests.server.processes import RunningStep
from tests.server.shared import cache_tokens_used

openai = LazyModule("openai")
pytestmark = pytest.mark.usefixtures("tritonserver")


def test_a_stream_that_is_too_long_ends_with_an_error(
    shared_server: RunningStep, tmp_path: Path
) -> None:
    arguments = ["--ready", str(shared_server.settings.ready_file), "--drain-timeout", "0.5"]
    with gateway(tmp_path, *arguments) as started:
        asked = {"model": "gpt", "prompt": "a", "max_tokens": 4000}
        asked |= {"stream": True, "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=started.facts["openai"], api_key="none") as client:
            pieces = client.completions.create(**asked)
            next(iter(pieces))
            started.process.terminate()
            with pytest.raises(openai.APIError, match="has ended before the whole answer") as last:
                list(pieces)
            assert last.value.code == "unavailable"
        assert started.process.wait(60) == 0, started.err
        assert "1 requests are given up after 0.5 s" in started.out
        assert "Traceback" not in started.err
    wait_for(lambda: cache_tokens_used(shared_server.ready, "gpt") == 0)
