"""A gateway without a model, for agents: it calls a tool, then repeats the tool's result.

    python3 -m benchmarks.clients.scripted --port 8080    # in the project's environment

The conversation is the only input of its answers. So a client that loses a call or a result on its
way is seen at once, and no weights are needed. The tool is the first one, with small values, unless
the question is "Call NAME with {ARGUMENTS}".
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server
from threading import Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette

from launcher_scripts.common.tokenizer import Tokenizer, load_tokenizer
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.gateway.app import make_app
from launcher_scripts.gateway.backend import Increment, Replica, RowRequest
from launcher_scripts.gateway.served_model import ChatTemplate, ServedModel

MODEL = "scripted"
TOKENIZER = Path(__file__).parents[2] / "tests" / "data" / "tokenizers" / "gpt2bpe"
ANSWER = "The tool gave: "
GREETING = "Hello from the script."
# Fails for a message without a text, as many published templates do.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}\n"
    "{% endfor %}<|assistant|>"
)
_TOOLS = "<tools>"
_ROLE = re.compile(r"<\|(\w+)\|>")
_QUESTION = re.compile(r"Call (\w+) with (\{.*?\})")


@dataclass(eq=False)
class ScriptedBackend:
    """Answers by the last message of the prompt.

    prompts: those that came
    """

    tokenizer: Tokenizer
    shares_prefixes: bool = False
    digests: Mapping[str, Any] | None = None
    prompts: list[str] = field(default_factory=list)

    async def generate(self, request: RowRequest) -> AsyncGenerator[Increment, None]:
        """See Backend."""
        prompt = self.tokenizer.decode(request.prompt_ids)
        self.prompts.append(prompt)
        text = self._text(prompt, json.loads(request.grammar) if request.grammar else None)
        ends = () if request.end_id is None else (request.end_id,)
        ids = (*self.tokenizer.encode(text), *ends)[: request.max_tokens]
        for index, token in enumerate(ids):
            yield Increment((token,), finished=index + 1 == len(ids))

    @staticmethod
    def _text(prompt: str, grammar: dict[str, Any] | None) -> str:
        *_, last, end = _ROLE.finditer(prompt)
        role, content = last[1], prompt[last.end() : end.start()]
        if grammar is not None and "any_of" in grammar:
            grammar = grammar["any_of"][0 if role == "tool" else 1]
        if grammar is not None:
            return json.dumps(instance(grammar.get("json_schema", {"type": "object"})))
        if role == "tool":
            return ANSWER + content.strip()
        if not prompt.startswith(_TOOLS):
            return GREETING
        if (question := _QUESTION.search(prompt)) is not None:
            call = {"name": question[1], "arguments": json.loads(question[2])}
        else:
            tools, _ = json.JSONDecoder().raw_decode(prompt, len(_TOOLS))
            function = tools[0]["function"]
            arguments = instance(function.get("parameters") or {"type": "object"})
            call = {"name": function["name"], "arguments": arguments}
        return f"<tool_call>{json.dumps(call)}</tool_call>"


def instance(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Return a small value that fits a schema of the kinds that agents send."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return instance(target, root)
    if "const" in schema or "enum" in schema:
        return schema.get("const", next(iter(schema.get("enum", [None]))))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return instance(schema[key][0], root)
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        return {name: instance(properties[name], root) for name in required if name in properties}
    if kind == "array":
        return [instance(schema.get("items") or {}, root)] * int(schema.get("minItems", 0))
    values = {"string": "Rome", "integer": 20, "number": 20.5, "boolean": True, "null": None}
    return values[kind[0] if isinstance(kind, list) else kind]


def scripted_app(backend: ScriptedBackend | None = None) -> tuple[Starlette, ScriptedBackend]:
    tokenizer = load_tokenizer(TOKENIZER)
    backend = backend or ScriptedBackend(tokenizer)
    model = ServedModel(
        MODEL,
        backend,
        tokenizer,
        ChatTemplate({"default": TEMPLATE}, {}),
        end_ids=() if tokenizer.end_id is None else (tokenizer.end_id,),
        max_len=200_000,
    )
    settings = GatewaySettings(("no server",), max_body=16 << 20)
    server = Replica("scripted:0", {MODEL: backend}, healthy=True)
    return make_app([model], settings, replicas=[server]), backend


@contextmanager
def serving(app: Starlette, port: int = 0) -> Iterator[str]:
    """The address at which the application answers, in a thread: http://host:port"""
    with create_server(("127.0.0.1", port)) as opened:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
        thread = Thread(target=server.run, args=([opened],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{opened.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8080)
    app, _ = scripted_app()
    uvicorn.run(app, port=parser.parse_args(argv).port, log_level="warning")


if __name__ == "__main__":
    main()
