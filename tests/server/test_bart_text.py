"""BARTs and translators in one server: the texts that transformers generates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
)
from tritonclient.utils import InferenceServerException

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.config.evaluation import GenerationSettings, TaskSettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.steps import measure_accuracy
from tests.gateway.processes import gateway
from tests.server.processes import running
from tests.server.repositories import export_settings
from tests.server.requests import Client, text_rows
from tests.tokenizer.bart_tokenizers import (
    bart,
    m2m_100,
    marian,
    mbart,
    mbart50,
    pieces,
    save_pieces,
)

pytestmark = [
    pytest.mark.usefixtures("tritonserver"),
    pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses"),
]
SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}
SERVED = ("bart", "mbart", "mbart50", "m2m_100")  # in this order; a Marian alone
TEXTS = ("The quick brown fox", "Über die Straße")
TOKENS = 12


@dataclass(frozen=True)
class Saved:
    """A random model and its tokenizer, as transformers has them."""

    model: Any
    tokenizer: Any

    def answer(self, text: str, tokens: int = TOKENS, **more: Any) -> str:
        """more: of generate, which counts a forced first token"""
        config = self.model.generation_config
        forced = more.get("forced_bos_token_id", config.forced_bos_token_id) is not None
        ids = self.model.generate(
            **self.tokenizer(text, return_tensors="pt"),
            max_new_tokens=tokens + forced,
            do_sample=False,
            forced_eos_token_id=None,
            **more,
        )
        return self.tokenizer.decode(
            ids[0, 1:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def lively(model: Any) -> Any:
    """The model with weights of which its texts depend much on their beginnings."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name and name.endswith("weight")
            if not parameter.requires_grad:
                continue  # positions, which are computed
            parameter.normal_(float(gain), 0.1 if "norm" in name else 1.5)
    return model.eval()


def make(folder: Path) -> dict[str, Saved]:
    """name -> a model saved below `folder`."""
    sentences = pieces()
    first, fifty = mbart(sentences, src_lang="de_DE"), mbart50(sentences, src_lang="de_DE")
    english, french = (
        each.convert_tokens_to_ids(code) for each, code in ((first, "en_XX"), (fifty, "fr_XX"))
    )
    byte_pairs = bart()
    saved = {
        "bart": Saved(
            lively(
                BartForConditionalGeneration(
                    BartConfig(**SIZES, vocab_size=len(byte_pairs), decoder_start_token_id=2)
                )
            ),
            byte_pairs,
        ),
        "mbart": Saved(
            lively(
                MBartForConditionalGeneration(
                    MBartConfig(**SIZES, vocab_size=len(first), decoder_start_token_id=english)
                )
            ),
            first,
        ),
        "mbart50": Saved(
            lively(
                MBartForConditionalGeneration(
                    MBartConfig(**SIZES, vocab_size=len(fifty), decoder_start_token_id=2)
                )
            ),
            fifty,
        ),
    }
    saved |= translators(folder, sentences)
    saved["bart"].model.generation_config.forced_bos_token_id = 0
    saved["mbart50"].model.generation_config.forced_bos_token_id = french
    for name, each in saved.items():
        each.model.save_pretrained(folder / name)
        each.tokenizer.save_pretrained(folder / name)
    save_pieces(folder / "mbart50", sentences, fifty)
    return saved


def translators(folder: Path, sentences: bytes) -> dict[str, Saved]:
    """An M2M-100 and a Marian, with the files of their tokenizers."""
    for name in ("m2m_100", "marian"):
        (folder / name).mkdir()
    many = m2m_100(folder / "m2m_100", sentences, src_lang="de")
    one = marian(folder / "marian", sentences)
    known = len(one)
    ids = {"pad_token_id": known - 1, "eos_token_id": 0, "decoder_start_token_id": known - 1}
    found = {
        "m2m_100": Saved(
            lively(M2M100ForConditionalGeneration(M2M100Config(**SIZES, vocab_size=len(many)))),
            many,
        ),
        "marian": Saved(lively(MarianMTModel(MarianConfig(**SIZES, vocab_size=known, **ids))), one),
    }
    found["marian"].model.generation_config.bad_words_ids = [[known - 1]]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Saved]]:
    folder = tmp_path_factory.mktemp("barts")
    return folder, make(folder)


@contextmanager
def serving(folder: Path, checkpoints: Path, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        settings = export_settings(
            folder,
            name=name,
            model_type="bart",
            checkpoint_path=str(checkpoints / name),
            processes=1,
        )
        export(settings)
        ModelRepository(settings.model_repository).write(settings)
    with running(folder / "job", settings.model_repository) as step:
        yield {**step.wait_until_ready(), "ready_file": str(step.settings.ready_file)}
        assert step.stop() == 0, step.err


@pytest.fixture(scope="module")
def served(saved: tuple[Path, dict[str, Saved]]) -> Iterator[dict[str, Any]]:
    with serving(saved[0], saved[0], SERVED) as ready:
        yield ready


def texts(client: Client, model: str, *prompts: str, **more: np.ndarray) -> list[str]:
    ensemble = f"{model}_ensemble" if model in SERVED[1:] else "ensemble"
    lengths = np.full((len(prompts), 1), TOKENS, np.uint32)
    answer = client.infer(ensemble, INPUT_0=text_rows(*prompts), INPUT_1=lengths, **more)
    return [row[0].decode() for row in answer["OUTPUT_0"][:, 0]]


@pytest.mark.parametrize("name", SERVED)
def test_texts(client: Client, saved: tuple[Path, dict[str, Saved]], name: str) -> None:
    check_texts(client, name, saved[1][name])


@pytest.mark.slow
def test_texts_of_a_marian(saved: tuple[Path, dict[str, Saved]], tmp_path: Path) -> None:
    folder, models = saved
    with serving(tmp_path, folder, ["marian"]) as ready, Client(ready, "grpc") as client:
        check_texts(client, "marian", models["marian"])
        check_ids(client, "preprocessing", models["marian"])


def check_texts(client: Client, name: str, model: Saved) -> None:
    found = texts(client, name, *TEXTS)
    assert found == [model.answer(text) for text in TEXTS]
    assert len(set(found)) == 2


def check_ids(client: Client, role: str, model: Saved) -> None:
    lengths = np.array([[1]], np.uint32)
    answer = client.infer(role, QUERY=text_rows(TEXTS[1]), REQUEST_OUTPUT_LEN=lengths)
    assert answer["INPUT_ID"][0].tolist() == model.tokenizer(TEXTS[1]).input_ids


def test_todays_names(client: Client, saved: tuple[Path, dict[str, Saved]]) -> None:
    told = client.infer(
        "mbart50_text",
        text_input=text_rows(TEXTS[0]),
        max_tokens=np.array([[TOKENS]], np.int32),
        target_language=text_rows("ro_RO"),
    )
    model = saved[1]["mbart50"]
    romanian = model.tokenizer.convert_tokens_to_ids("ro_RO")
    expected = model.answer(TEXTS[0], forced_bos_token_id=romanian)
    assert told["text_output"][0].decode() == expected


def test_languages_of_a_request(client: Client, saved: tuple[Path, dict[str, Saved]]) -> None:
    sources, targets = ("it_IT", "ja_XX"), ("fr_XX", "cs_CZ")
    for name, key in (
        ("mbart", "decoder_start_token_id"),
        ("mbart50", "forced_bos_token_id"),
        ("m2m_100", "forced_bos_token_id"),
    ):
        model = saved[1][name]
        if name == "m2m_100":
            sources, targets = ("it", "ja"), ("fr", "__cs__")
        chosen = {
            "source_language": text_rows(*sources),
            "target_language": text_rows(*targets),
        }
        usual, expected = model.tokenizer.src_lang, []
        for text, source, target in zip(TEXTS, sources, targets, strict=True):
            model.tokenizer.src_lang = source
            marked = f"__{target}__" if target == "fr" else target
            expected.append(
                model.answer(text, **{key: model.tokenizer.convert_tokens_to_ids(marked)})
            )
        model.tokenizer.src_lang = usual
        assert texts(client, name, *TEXTS, **chosen) == expected
        assert texts(client, name, *TEXTS) != expected


def test_a_request_that_says_how_the_decoder_begins(
    client: Client, saved: tuple[Path, dict[str, Saved]]
) -> None:
    """No token is forced then."""
    model = saved[1]["bart"]
    expected = model.answer(TEXTS[0], forced_bos_token_id=None, decoder_start_token_id=7)
    begun = np.array([[7]], np.uint32)
    assert texts(client, "bart", TEXTS[0], start_id=begun) == [expected]
    assert texts(client, "bart", TEXTS[0], decoder_input_ids=begun) == [expected]


def test_a_gateway_translates_between_named_languages(
    served: dict[str, Any], saved: tuple[Path, dict[str, Saved]], tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    with (
        gateway(tmp_path, "--ready", served["ready_file"]) as started,
        openai.OpenAI(base_url=started.facts["openai"], api_key="none", max_retries=0) as asked,
    ):
        for name, source, target in (("m2m_100", "it", "fr"), ("mbart", "it_IT", "cs_CZ")):
            model, usual = saved[1][name], saved[1][name].tokenizer.src_lang
            more: dict[str, Any] = {
                "model": name,
                "prompt": TEXTS[0],
                "max_tokens": TOKENS,
                "temperature": 0,
            }
            found = asked.completions.create(
                **more, extra_body={"source_language": source, "target_language": target}
            )
            code = f"__{target}__" if name == "m2m_100" else target
            key = "decoder_start_token_id" if name == "mbart" else "forced_bos_token_id"
            model.tokenizer.src_lang = source
            token = model.tokenizer.convert_tokens_to_ids(code)
            expected = model.answer(TEXTS[0], **{key: token})
            model.tokenizer.src_lang = usual
            assert found.choices[0].text.strip() == expected.strip()
            with pytest.raises(openai.BadRequestError, match="knows no language 'xx'"):
                asked.completions.create(**more, extra_body={"target_language": "xx"})


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("bart", {"target_language": text_rows("fr_XX")}, "knows no languages"),
        ("mbart", {"source_language": text_rows("the")}, r"language of the tokenizer; got \['the'"),
        (
            "mbart50",
            {"target_language": text_rows("fr_XX"), "start_id": np.array([[2]], np.uint32)},
            "target_language and start_id exclude each other",
        ),
    ],
)
def test_wrong_languages(client: Client, name: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        texts(client, name, TEXTS[0], **more)


def test_preprocessing_alone(client: Client, saved: tuple[Path, dict[str, Saved]]) -> None:
    for name in SERVED:
        role = "preprocessing" if name == "bart" else f"{name}_preprocessing"
        check_ids(client, role, saved[1][name])


def test_an_evaluation_asks_as_the_text_models_do(
    served: dict[str, Any], saved: tuple[Path, dict[str, Saved]], tmp_path: Path
) -> None:
    folder, models = saved
    articles = tmp_path / "articles.csv"
    articles.write_text(f"id,article,highlights\n1,{TEXTS[0]},a fox\n", encoding="utf-8")
    model = models["mbart50"]
    model.tokenizer.src_lang = "it_IT"
    romanian = model.answer(
        TEXTS[0], forced_bos_token_id=model.tokenizer.convert_tokens_to_ids("ro_RO")
    )
    model.tokenizer.src_lang = "de_DE"
    expected = {(None, None): model.answer(TEXTS[0]), ("it_IT", "ro_RO"): romanian}
    assert len({*expected.values()}) == 2
    for number, ((source, target), answer) in enumerate(expected.items()):
        results = tmp_path / str(number)
        item, reference = evaluated(served, folder, results, articles, source, target)
        assert item["prediction"] == answer.strip()
        assert reference["difference"]["rouge1"] == 0 and not reference["different"]


def evaluated(
    served: dict[str, Any], folder: Path, results: Path, articles: Path, *languages: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only item of an mBART-50's evaluation, and what transformers made of it."""
    generation = GenerationSettings(
        output_len=TOKENS,
        template="{article}",
        source_language=languages[0],
        target_language=languages[1],
    )
    settings = EvaluateSettings(
        ready_file=served["ready_file"],
        results_dir=str(results),
        model_name="mbart50",
        tokenizer_dir=str(folder / "model_repo" / "mbart50" / "1" / "1-gpu"),
        tasks=(
            TaskSettings(
                "summarization",
                str(articles),
                reference=str(folder / "mbart50"),
                generation=generation,
            ),
        ),
    )
    results.mkdir()
    write_settings(settings, results / "settings.yaml")
    assert measure_accuracy.main(["--settings", str(results / "settings.yaml")]) == 0
    task = json.loads((results / "report.json").read_text())["tasks"]["summarization"]
    (item,) = task["items"]
    return item, task["reference"]


@pytest.mark.usefixtures("served")
def test_the_forced_token_stands_in_config_ini(saved: tuple[Path, dict[str, Saved]]) -> None:
    folder, models = saved
    for name in SERVED:
        config = read_config(folder / "model_repo" / name / "1" / "1-gpu").config
        assert config.forced_bos_id == models[name].model.generation_config.forced_bos_token_id
