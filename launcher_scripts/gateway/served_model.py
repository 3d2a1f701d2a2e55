"""One model as the gateway serves it: its engine, its tokenizer, its chat template."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache, partial
from typing import Any

from pydantic_core import from_json

from launcher_scripts.common.files import DigestChain
from launcher_scripts.common.limited_process import LimitedProcesses, WorkLimitError, WorkLimits
from launcher_scripts.common.rendering import FAILURE, REFUSAL, SYNTAX, TEXT
from launcher_scripts.common.tokenizer import SpecialIds, TokenizationError, Tokenizer
from launcher_scripts.gateway.admission import NUM_THREADS, ThreadsOfClient
from launcher_scripts.gateway.api_errors import ApiError, ContextOverflow, bad_request, unsupported
from launcher_scripts.gateway.backend import Backend, ServedLoRA
from launcher_scripts.gateway.harmony import conversation, writes_harmony
from launcher_scripts.gateway.reasoning import with_both_names
from launcher_scripts.gateway.schemas import ChatPrompt

# Of one text: templates of real models take milliseconds.
LIMITS = WorkLimits(cpu_seconds=2.0, seconds=30.0, memory_mib=256)
MAX_CHARS = 16 << 20
# Stands at the end of a message that is to be continued; the text is cut there.
_MARK = "\ue000the-end-of-what-is-continued\ue000"
_PROBE = "a part of a message"
DEFAULT = "default"
WITH_TOOLS = "tool_use"


class ChatTemplate:
    """A model's templates, ready to render.

    Raises ValueError for one that is not Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """templates: name -> text, the usual one `default`; special_tokens: bos_token, ..."""
        self._templates = dict(templates)
        self._processes = _processes()
        for text in templates.values():
            try:
                result = self._processes.call({"template": text})
            except WorkLimitError as error:
                raise ValueError(str(error)) from error
            if SYNTAX in result:
                raise ValueError(result[SYNTAX])
        self.text = templates.get(DEFAULT, next(iter(templates.values())))
        self._special_tokens = dict(special_tokens)
        self.takes_parts = self._takes_parts()
        self.writes_harmony = writes_harmony(self.text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text; blocks until a process has rendered it.

        Raises ApiError with what the template refuses, and for one that exceeds its limits.

        more: further values for the template
        """
        if continue_final_message:
            messages = _marked(messages)
        name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        template = self._templates.get(name) or next(iter(self._templates.values()))
        values = {"documents": None, **self._special_tokens, **(more or {})}
        variables = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._text(template, {**values, **variables})
        return _until_mark(text) if continue_final_message else text

    def _text(self, template: str, values: Mapping[str, Any]) -> str:
        item = {"template": template, "values": values, "max_chars": MAX_CHARS}
        try:
            result = self._processes.call(item)
        except WorkLimitError as error:
            result = {FAILURE: str(error)}
        if REFUSAL in result:
            raise bad_request(f"the chat template refuses this: {result[REFUSAL]}", "messages")
        if FAILURE in result:
            message = f"the chat template cannot render this: {result[FAILURE]}"
            raise bad_request(message, "messages")
        return str(result[TEXT])

    def _takes_parts(self) -> bool:
        """Return whether a message's content may be a list of parts, rather than one text."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self.render([message])
        except ApiError:
            return False
        # One that knows texts alone would write the list as Python or JSON does.
        quoted = (f"{quote}{_PROBE}{quote}" for quote in "'\"")
        return _PROBE in text and not any(item in text for item in quoted)


@cache
def _processes() -> LimitedProcesses:
    """One for each thread that may wait for a text; most are never started."""
    return LimitedProcesses(
        "launcher_scripts.common.rendering:make_renderer", None, LIMITS, NUM_THREADS
    )


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, the last one's text with the mark behind it."""
    *before, last = messages
    if last.get("tool_calls"):  # its text precedes its calls
        raise bad_request("the last message ends with tool calls", "continue_final_message")
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _MARK}]
    if isinstance(content, list) and content:
        *parts, end = content
        return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + _MARK}]}]
    raise bad_request("the last message has no text to continue", "continue_final_message")


def _until_mark(text: str) -> str:
    """Without the mark and what follows, and without blanks that the template has trimmed."""
    start, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise bad_request(
            "the chat template leaves out the message that is to be continued",
            "continue_final_message",
        )
    return start


_DEVELOPER = "developer"  # what OpenAI's clients call the system's role


@dataclass(frozen=True)
class ServedModel:
    """A model that generates text, or encodes it.

    special:     the ids around a prompt
    end_ids:     what ends an answer; the first one is the engine's end_id
    defaults:    of the sampling, from the checkpoint's generation_config.json
    max_len:     tokens of prompt and answer; None: not known
    max_chars:   of a prompt, before it is tokenized; None: any number
    encodes:     an encoder-decoder, whose prompt is the encoder's input
    embeds:      an encoder alone, which gives vectors
    token_names: bos_token and the like, for /tokenizer_info
    digests:     of its weights and of the checkpoints that they are from; None: not known
    lora_names:  its LoRA adapters, in the order of their numbers
    added_loras: those that were added since it is served
    lora_adapter, parent: of one of these as a model: its number, and the name of its base
    added_lora:  of one that was added as a model
    """

    name: str
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    special: SpecialIds = field(default_factory=SpecialIds)
    end_ids: tuple[int, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    max_len: int | None = None
    max_chars: int | None = None
    encodes: bool = False
    embeds: bool = False
    token_names: Mapping[str, str] = field(default_factory=dict)
    digests: DigestChain | None = None
    lora_names: tuple[str, ...] = ()
    added_loras: tuple[ServedLoRA, ...] = ()
    added_lora: ServedLoRA | None = None
    lora_adapter: int | None = None
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str | None:
        """Return the system_fingerprint of the weights that the servers have now."""
        current = self.current_digests
        return None if current is None else str(current["system_fingerprint"])

    @property
    def current_digests(self) -> Mapping[str, Any] | None:
        """Return the values of the DigestChain of the weights that the servers have now."""
        of_start = None if self.digests is None else self.digests.values()
        return self.backend.digests or of_start

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a prompt. Raises ApiError."""
        try:
            ids = self.tokenizer.encode(text)
        except TokenizationError as error:
            raise bad_request(str(error), "prompt") from error
        return self.special.surround(ids) if special_tokens else ids

    async def encode_aside(
        self, texts: Sequence[str], threads: ThreadsOfClient, *, special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """The ids of each prompt, by a thread if they are long. Raises ApiError for one that is
        longer than `max_chars`.
        """
        longest = max(map(len, texts), default=0)
        if self.max_chars is not None and longest > self.max_chars:
            message = f"This model's maximum context length is {self.max_len} tokens. However, "
            message += f"your prompt has {longest} characters, more than {self.max_chars}. Please "
            message += "reduce its length, or change --max-prompt-chars of the gateway."
            reference = f"prompt is too long: {longest} characters > {self.max_chars} maximum"
            raise ContextOverflow(message, reference, "prompt")
        return await threads.run(
            lambda: [tuple(self.encode(text, special_tokens=special_tokens)) for text in texts],
            sum(map(len, texts)) + len(texts),
        )

    def between(self, source: str | None, target: str | None) -> ServedModel:
        """The model for prompts in one language and answers in another; None: as it is.

        Raises ApiError for a name that is not one of its languages.
        """
        if source is None and target is None:
            return self
        languages = self._language("source", source), self._language("target", target)
        return replace(self, special=self.special.between(*languages))

    def _language(self, role: str, name: str | None) -> int | None:
        if name is None:
            return None
        if self.special.language is None:
            raise unsupported(f"{role}_language", f"{self.name} knows no languages")
        result = self.special.language_id(name, self.tokenizer)
        if result is None:
            raise bad_request(f"{self.name} knows no language {name!r}", f"{role}_language")
        return result

    async def chat_text(self, chat: ChatPrompt, threads: ThreadsOfClient) -> str:
        """The messages as the model's template writes them, by a thread. Raises ApiError."""
        if self.template is None:
            raise bad_request(
                f"{self.name} has no chat template: ask /v1/completions, or start the gateway with "
                "--chat-template FILE",
                "messages",
                "no_chat_template",
            )
        if chat.add_generation_prompt and chat.continue_final_message:
            if "add_generation_prompt" in chat.model_fields_set:
                raise bad_request(
                    "add_generation_prompt and continue_final_message exclude each other",
                    "continue_final_message",
                )
            chat = chat.model_copy(update={"add_generation_prompt": False})
        return await threads.run(partial(self._render, self.template, chat))

    def _render(self, template: ChatTemplate, chat: ChatPrompt) -> str:
        messages = [
            with_both_names(_with_arguments(_with_content(message.model_dump(exclude_unset=True))))
            for message in chat.messages
        ]
        if not template.takes_parts:
            messages = [_with_one_text(message) for message in messages]
        if template.writes_harmony:
            messages = conversation(messages)
        if _DEVELOPER not in template.text:
            messages = [_as_system(message) for message in messages]
        return template.render(
            messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            more=chat.template_values,
        )

    def adapters(self) -> list[ServedModel]:
        """Its LoRA adapters as models, called <its name>:<adapter>."""
        numbers: list[tuple[str, int, ServedLoRA | None]] = [
            *((name, number, None) for number, name in enumerate(self.lora_names)),
            *((added.name, added.number, added) for added in self.added_loras),
        ]
        return [
            replace(
                self,
                name=f"{self.name}:{name}",
                lora_names=(),
                added_loras=(),
                added_lora=added,
                lora_adapter=number,
                parent=self.name,
            )
            for name, number, added in numbers
        ]

    def card(self) -> dict[str, Any]:
        """Return the entry of /v1/models for OpenAI's and for Anthropic's clients."""
        created = datetime.fromtimestamp(self.created, timezone.utc)
        return {
            "id": self.name,
            "object": "model",
            "type": "model",
            "display_name": self.name,
            "lifecycle": "active",
            "created": self.created,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "owned_by": "deployment",
            "root": self.parent or self.name,
            "parent": self.parent,
            "max_model_len": self.max_len,
            "max_input_tokens": self.max_len,
            "max_tokens": self.max_len,
        }


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a text or parts as its content and without empty fields.

    Many templates concatenate `content` and test only if `tool_calls` is present, and clients send
    both as null: https://platform.openai.com/docs/api-reference/chat/create (messages).
    """
    fields = {
        name: value
        for name, value in message.items()
        if value is not None and (name != "tool_calls" or value)
    }
    refusal = fields.pop("refusal", "")
    return {**fields, "content": fields.get("content") or refusal}


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message, the arguments of its calls as templates want them: as values, not as JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(
        arguments := function.get("arguments") or "{}", str
    ):
        return call
    try:
        values = from_json(arguments)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": values}}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the developer as one of the system, which every template knows."""
    return {**message, "role": "system"} if message["role"] == _DEVELOPER else message


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message, the parts of its content as lines of one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


class Models:
    """The models of a gateway by name.

    all:    those that servers serve
    listed: these and their LoRA adapters, which go by their own names where these are of one
            adapter and of no model
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._numbers = itertools.count()
        self._set(models)

    def _set(self, models: Sequence[ServedModel]) -> None:
        self.all = tuple(models)
        adapters = [adapter for model in models for adapter in model.adapters()]
        short = [adapter.name.rpartition(":")[2] for adapter in adapters]
        used_names = Counter([*short, *(model.name for model in models)])
        labels = [
            replace(adapter, name=name) if used_names[name] == 1 else adapter
            for adapter, name in zip(adapters, short, strict=True)
        ]
        self.listed = (*self.all, *labels)
        long = {adapter.name: model for adapter, model in zip(adapters, labels, strict=True)}
        self._named = long | {model.name: model for model in self.listed}

    def new_lora(self, model: ServedModel, name: str, path: str) -> ServedLoRA:
        """Return an adapter that can be added to a model. Raises ApiError."""
        if not path.startswith("/"):
            message = f"lora_path is an absolute path on the server; got {path!r}"
            raise bad_request(message, "lora_path")
        if name in {*model.lora_names, *(lora.name for lora in model.added_loras)}:
            message = f"{model.name} has an adapter {name!r}: unload it first"
            raise bad_request(message, "lora_name")
        if name in {other.name for other in self.all}:
            raise bad_request(f"a model has the name {name!r}", "lora_name")
        return ServedLoRA(name, path, len(model.lora_names) + next(self._numbers))

    def put(self, model: ServedModel) -> None:
        """Let a model come in the place of that of its name."""
        self._set([model if other.name == model.name else other for other in self.all])

    def find(self, name: str | None) -> ServedModel:
        """The model called so; without a name the only one. Raises ApiError."""
        names = ", ".join(model.name for model in self.listed)
        if name is None:
            if len(self.all) == 1:
                return self.all[0]
            raise bad_request(f"which model is meant; choices: {names}", "model")
        if name in self._named:
            return self._named[name]
        message = f"there is no model {name[:100]!r}; choices: {names}"
        raise ApiError(404, message, code="model_not_found", param="model")
