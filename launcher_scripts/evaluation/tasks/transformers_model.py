"""The only door to transformers: a checkpoint in Hugging Face's format as a reference.

It answers the same token ids in float32, one batch after the other, so that a difference is the
served model's own.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.contract_tensors import States
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.task import (
    REFERENCE_KEY,
    HiddenStates,
    NoReferenceError,
    TaskModel,
    TorchReference,
    reject_tuned,
)
from launcher_scripts.models.bart import NEVER


class TransformersModel(TorchReference, TaskModel):
    """Generates greedily or by beams, and scores."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when transformers is not there or cannot load the folder."""
        torch, transformers = _libraries()
        self._torch = torch
        self._model = _load(
            folder,
            lambda config: (
                transformers.AutoModelForSeq2SeqLM
                if config.is_encoder_decoder
                else transformers.AutoModelForImageTextToText
                if hasattr(config, "vision_config")
                else transformers.AutoModelForCausalLM
            ),
        )
        self._encodes = bool(self._model.config.is_encoder_decoder)
        if self._model.config.model_type == "marian":  # it is banned where texts are generated
            self._model.final_logits_bias[:, self._model.config.pad_token_id] = NEVER
        values = self._model.generation_config
        ends = values.eos_token_id
        self._end_ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
        # The folder's own penalties, lengths and forced tokens are not what the server is asked.
        self._model.generation_config = transformers.GenerationConfig(
            bos_token_id=values.bos_token_id,
            eos_token_id=ends,
            decoder_start_token_id=values.decoder_start_token_id,
        )
        self.name = f"transformers {transformers.__version__}, float32: {folder}"

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """Iterate over the outputs of the rows, in order; `in_flight` rows are padded to one
        batch."""
        waiting = iter(rows)
        while batch := list(itertools.islice(waiting, in_flight)):
            yield from self._generate(batch)

    def logits(self, ids: Sequence[int], decoder_ids: Sequence[int] = ()) -> NDArray[np.float32]:
        """float32 [tokens, vocab] at every position of the prompt, or of the decoder's."""
        return _rows(self._forward(ids, decoder_ids).logits)

    def layer_states(
        self, ids: Sequence[int], decoder_ids: Sequence[int], stacks: Mapping[str, int]
    ) -> HiddenStates:
        """Return every layer's input and output; stacks: the number of layers of each.

        Raises NoReferenceError for a model whose layers cannot be found.
        """
        inputs: dict[Any, Any] = {}
        outputs: dict[Any, Any] = {}

        def on_layer(module: Any, arguments: Any, options: Any, result: Any) -> None:
            inputs[module] = _first_tensor((*arguments, options.get("hidden_states")))
            outputs[module] = _first_tensor(result)

        layers = {stack: self._layers(stack, stacks) for stack in stacks}
        head = self._model.get_output_embeddings()
        watched = [*itertools.chain(*layers.values()), head]
        with self._watching(watched, on_layer):
            result = self._forward(ids, decoder_ids)
        states = {
            stack: [(_rows(inputs[layer]), _rows(outputs[layer])) for layer in modules]
            for stack, modules in layers.items()
        }
        source = getattr(result, "encoder_last_hidden_state", None)
        normed, logits = _rows(inputs[head]), _rows(result.logits)
        return HiddenStates(states, None if source is None else _rows(source), normed, logits)

    def intermediates(
        self,
        ids: Sequence[int],
        decoder_ids: Sequence[int],
        layer: tuple[str, int],
        stacks: Mapping[str, int],
    ) -> list[NDArray[np.float32]]:
        """Return what the modules of a layer (stack, number) read and make, [tokens, width]."""
        values: list[NDArray[np.float32]] = []

        def on_module(_module: Any, arguments: Any, options: Any, result: Any) -> None:
            tensors = (*arguments, *options.values())
            for tensor in (_first_tensor(tensors), _first_tensor(result)):
                if tensor is not None and tensor.is_floating_point():
                    values.append(_rows(tensor))

        stack, number = layer
        with self._watching(self._layers(stack, stacks)[number].modules(), on_module):
            self._forward(ids, decoder_ids)
        return values

    def _forward(self, ids: Sequence[int], decoder_ids: Sequence[int]) -> Any:
        more = {"decoder_input_ids": self._torch.tensor([list(decoder_ids)])} if decoder_ids else {}
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([list(ids)]), **more)

    @contextlib.contextmanager
    def _watching(self, modules: Iterable[Any], callback: Callable[..., None]) -> Iterator[None]:
        hooks = [module.register_forward_hook(callback, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _layers(self, stack: str, stacks: Mapping[str, int]) -> Sequence[Any]:
        """The modules of a stack's layers: the outermost list that has as many."""
        kind, count = self._torch.nn.ModuleList, stacks[stack]
        lists: dict[str, Sequence[Any]] = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, kind)
            and len(module) == count
            and (len(stacks) == 1 or stack in name)
        }
        if not lists:
            raise NoReferenceError(f"transformers' model has no list of {count} layers")
        return lists[min(lists, key=lambda name: name.count("."))]

    def rotary_alternatives(self, ids: Sequence[int]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The logits of the prompt with other rotary positions, and what was changed.

        Nothing for a model that does not keep them in one place with one set of parameters.
        """
        body = self._model.base_model
        rotary, config = getattr(body, "rotary_emb", None), body.config
        parameters = getattr(config, "rope_parameters", None)
        if rotary is None or not isinstance(parameters, dict) or "rope_theta" not in parameters:
            return
        try:
            for changes in _other_rotary(parameters):
                config.rope_parameters = changes
                with contextlib.suppress(KeyError, ValueError, TypeError):
                    body.rotary_emb = type(rotary)(config)
                    yield _rotary_text(changes), self.logits(ids)
        finally:
            config.rope_parameters, body.rotary_emb = parameters, rotary

    def _generate(self, rows: Sequence[GenerateRequest]) -> Iterator[GenerateOutput]:
        reject_tuned(rows, "transformers", decoders_that_begin_otherwise=_differ(rows))
        torch = self._torch
        longest = max(len(row.input_ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, S]
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            # A decoder goes on where its prompt ends, so its padding comes first.
            arguments = (
                slice(0, len(row.input_ids)) if self._encodes else slice(-len(row.input_ids), None)
            )
            ids[index, arguments] = torch.tensor(row.input_ids)
            mask[index, arguments] = 1
        decoder_start = rows[0].decoder_input_ids
        more = (
            {"decoder_input_ids": torch.tensor([decoder_start] * len(rows))}
            if decoder_start
            else {}
        )
        with torch.inference_mode():
            answers = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(row.output_len for row in rows),
                do_sample=False,
                **more,
                **beam_arguments(rows),
                pad_token_id=self._end_ids[0] if self._end_ids else 0,
            )
        start = max(1, len(decoder_start)) if self._encodes else longest
        for row, answer in zip(rows, answers.tolist(), strict=True):
            yield GenerateOutput(self._completed(answer[start : start + row.output_len]))

    def _completed(self, ids: list[int]) -> tuple[int, ...]:
        """The ids up to their first end token, that one included."""
        ends = [index for index, token in enumerate(ids) if token in self._end_ids]
        return tuple(ids[: ends[0] + 1] if ends else ids)


class TransformersEncoder:
    """The encoder of a T5, mT5 or UMT5, whether its folder has the decoder or not."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when transformers is not there or cannot load the folder."""
        self._torch, transformers = _libraries()
        self._model = _load(folder, lambda _: transformers.AutoModelForTextEncoding)

    def states(self, row: GenerateRequest) -> States:
        """float32 [tokens, hidden]: the last layer's, after its norm."""
        reject_tuned([row], "transformers")
        ids = self._torch.tensor([row.input_ids])
        with self._torch.inference_mode():
            result = self._model(ids).last_hidden_state[0]
        states: States = result.numpy()
        return states


def _first_tensor(values: Any) -> Any:
    """The first tensor of what a module reads or makes; None without one."""
    items = values if isinstance(values, (tuple, list)) else (values,)
    return next((item for item in items if hasattr(item, "is_floating_point")), None)


def _rows(values: Any) -> NDArray[np.float32]:
    """A row's values [tokens, width], of [1, tokens, ...] or [tokens, ...]."""
    row = values[0] if values.dim() > 2 else values
    result: NDArray[np.float32] = row.float().flatten(1).numpy().copy()
    return result


def _differ(rows: Sequence[GenerateRequest]) -> bool:
    return len({row.decoder_input_ids for row in rows}) > 1


def _libraries() -> tuple[Any, Any]:
    """torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            problem(f"the reference needs the package {error.name}", change=REFERENCE_KEY)
        ) from error
    return torch, transformers


def _load(folder: Path, kind_of: Callable[[Any], Any]) -> Any:
    """The model in `folder` in float32, by the class that kind_of gives for its configuration."""
    torch, transformers = _libraries()
    try:
        kind = kind_of(transformers.AutoConfig.from_pretrained(folder))
        model, loading = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if loading["missing_keys"]:
            raise ValueError(f"it lacks {sorted(loading['missing_keys'])[0]} and others")
    except Exception as error:  # transformers lets those of every library below through
        label = f"transformers cannot load {folder}: {type(error).__name__}: {error}"
        raise ConfigError(problem(label, change=REFERENCE_KEY)) from error
    return model.eval()


def _other_rotary(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters as rope_parameters has them: other scalings, factors and bases."""
    common = {key: value for key, value in parameters.items() if key == "partial_rotary_factor"}
    theta = parameters["rope_theta"]
    plain = {**common, "rope_type": "default", "rope_theta": theta}
    factor = parameters.get("factor")
    if parameters["rope_type"] != "default":
        yield plain
        yield from (
            {**parameters, "factor": factor * part} for part in (0.5, 2.0, 0.25, 4.0) if factor
        )
    for other in (2.0, 4.0, 8.0, 16.0, 32.0, factor):
        if other:
            yield {**plain, "rope_type": "linear", "factor": other}
    for base in (1e4, 2e4, 5e4, 1e5, 5e5, 1e6, 2 * theta, theta / 2, 10 * theta, theta / 10):
        if base != theta:
            yield {**parameters, "rope_theta": base}


def _rotary_text(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in parameters.items())


class TransformersText:
    """The tokenizer of a folder, as transformers reads texts and chats with it."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when transformers is not there or cannot load the tokenizer."""
        try:
            import transformers

            _read_pieces_with_bundled_code()
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of whatever library the tokenizer needs
            message = f"transformers cannot load the tokenizer of {folder}: {error}"
            raise ConfigError(problem(message, change="evaluate.twin.runner")) from error
        self.has_chat_template = bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        """The ids of a text; with_special: with the tokens that the model was trained to see."""
        return list(self._tokenizer(text, add_special_tokens=with_special).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def added_tokens(self) -> list[str]:
        """The tokens that are found in a text before it is cut.

        Without CodeLlama's mark of a gap, around which transformers turns a text about.
        """
        tokens = map(str, self._tokenizer.added_tokens_decoder.values())
        return [token for token in tokens if token != getattr(self._tokenizer, "fill_token", None)]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A chat as text, ready for an answer; ValueError for what the template refuses."""
        try:
            chat = [dict(message) for message in messages]
            text = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # what a template raises, and what Jinja does
            raise ValueError(str(error)) from error
        return str(text)


def _read_pieces_with_bundled_code() -> None:
    """Have transformers read SentencePiece models by its own copy of their message.

    The code that sentencepiece generates for it needs a newer protobuf than tritonclient allows.
    """
    name = "sentencepiece.sentencepiece_model_pb2"
    with contextlib.suppress(ImportError):
        package: Any = importlib.import_module("sentencepiece")
        runtime: Any = importlib.import_module("google.protobuf.runtime_version")
        try:
            importlib.import_module(name)
        except runtime.VersionError:
            protobuf_module = importlib.import_module(
                "transformers.utils.sentencepiece_model_pb2_new"
            )
            sys.modules[name] = package.sentencepiece_model_pb2 = protobuf_module


def beam_arguments(rows: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Return the arguments with which transformers searches as the served engine does; the rows
    must agree on them."""
    widths = {(row.sampling.beam_width, row.sampling.len_penalty) for row in rows}
    if len(widths) > 1:
        raise ConfigError(
            problem("rows of one batch need one beam_width and len_penalty", got=sorted(widths))
        )
    ((width, len_penalty),) = widths
    if width == 1:
        return {"num_beams": 1}
    return {"num_beams": width, "length_penalty": len_penalty, "early_stopping": True}
