"""lm_eval's own program with one more type of model, `gateway-completions`.

It is run by the Python that has lm_eval, which need not have the project's packages:

    python3 lm_eval_program.py version
    OPENAI_API_KEY=... python3 lm_eval_program.py run --model gateway-completions ...

The exit status is MISSING where lm_eval is not installed, and NO_DATA where a data set is not in
the working directory.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MISSING = 3
NO_DATA = 4


def main() -> int:
    try:
        print(f"lm_eval {version('lm_eval')}", flush=True)
    except PackageNotFoundError:
        return MISSING
    if sys.argv[1:] == ["version"]:
        return 0
    return run()


def run() -> int:
    """lm_eval's command line. A data set that is not there is looked for on the hub, offline."""
    register()
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except (ConnectionError, FileNotFoundError) as error:
        traceback.print_exc()
        return NO_DATA if "Hub" in str(error) else 1
    return 0


def register() -> None:
    """Tell lm_eval of gateway-completions."""
    from lm_eval.api.registry import register_model
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.utils import RemoteTokenizer

    class GatewayTokenizer(RemoteTokenizer):  # type: ignore[misc]
        """The tokenizer of one model behind a gateway, which may want a key."""

        def __init__(self, base_url: str, model: str) -> None:
            self.named = {"model": model}  # in the first request, which super() sends, too
            super().__init__(base_url, auth_token=os.environ.get("OPENAI_API_KEY"))

        def _request_with_retries(self, method: str, url: str, **more: Any) -> Any:
            if method == "GET":
                more["params"] = self.named
            else:
                more["json"] = {**self.named, **more["json"]}
            return super()._request_with_retries(method, url, **more)

        def encode(self, text: str, special: bool = False) -> list[int]:
            body = {"prompt": text, "add_special_tokens": special}
            answer = self._request_with_retries("POST", f"{self.base_url}/tokenize", json=body)
            return list(answer.json()["tokens"])

    @register_model("gateway-completions")
    class GatewayCompletions(LocalCompletionsAPI):  # type: ignore[misc]
        """lm_eval's local-completions with the token ids that its `hf` model would take.

        Those have the special tokens that the tokenizer puts around every text, which
        local-completions leaves out when the server tokenizes.
        """

        def __init__(self, model: str, base_url: str, **more: object) -> None:
            super().__init__(model=model, base_url=base_url, tokenizer_backend="none", **more)
            self.tokenizer = GatewayTokenizer(base_url, model)
            self.tokenizer_backend, self.tokenized_requests = "remote", True
            self.add_bos_token = None  # as the tokenizer does it

        def tok_encode(
            self,
            string: str | list[str],
            left_truncate_len: int | None = None,
            add_special_tokens: bool | None = None,
            **_: object,
        ) -> list[int] | list[list[int]]:
            if isinstance(string, str):
                return self.encoded(string, left_truncate_len, add_special_tokens)
            return [self.encoded(text, left_truncate_len, add_special_tokens) for text in string]

        def encoded(self, text: str, limit: int | None, special: bool | None) -> list[int]:
            """The last `limit` ids of a text. special None: as the tokenizer does it, once."""
            has_bos = self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token)
            ids = self.tokenizer.encode(text, not has_bos if special is None else special)
            return ids[-limit:] if limit else ids


if __name__ == "__main__":
    sys.exit(main())
