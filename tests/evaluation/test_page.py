"""report.html as people see it: every section, on a screen, in the dark, on a phone, on paper."""

import itertools
import json
import re
from pathlib import Path

import pytest

from launcher_scripts.evaluation import plots
from launcher_scripts.evaluation.page import TITLES, clipped, formatted, hardware, html, size
from launcher_scripts.evaluation.speed import cost_table, floor_table, price_of, step_reads
from tests.browser import browser, missing

EXAMPLE_FILE = Path(__file__).with_name("example_report.json")
NASTY = "<img src=x onerror='document.title=1'> & \"</script>"
# What has a meaning, so that no text may stand in its place.
MEANT = {"verdict", "level", "mode", "date", "protocol", "device", "rung"}
needs_browser = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture
def example():
    return json.loads(EXAMPLE_FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def example_page():
    """report.html of the example, with its plots."""
    return html(json.loads(EXAMPLE_FILE.read_text(encoding="utf-8")))


def headings(page):
    return re.findall(r"<h2 [^>]*>([^<]*)</h2>", page)


def test_every_section_is_shown_in_its_order(example_page):
    assert headings(example_page) == list(TITLES.values())
    assert len(example_page) < 1_000_000
    for shown in ("NO-GO", "must not go live", "4 bounds passed", "25.80", "NVIDIA H200"):
        assert shown in example_page
    assert not re.search(r'(?:src|href)="(?!#|report\.json|\.\./|data:,)', example_page)
    assert not re.search(r"@import|url\((?!#)", example_page)


@pytest.mark.parametrize("section", ["twin", "harness", "load", "ladder", "verdict", "speed"])
@pytest.mark.usefixtures("undrawn")
def test_every_section_may_be_absent_or_alone(example, section):
    heading = TITLES.get(section)
    alone = {"schema": 1, "model": "gpt", "tasks": {}, section: example[section]}
    shown = headings(html(alone))
    assert shown == [] if heading is None else heading in shown
    assert TITLES["quality"] not in shown
    others = {key: value for key, value in example.items() if key != section}
    shown = headings(html(others))
    assert heading not in shown and {TITLES["quality"], TITLES["cost"]} <= {*shown}


@pytest.mark.usefixtures("undrawn")
def test_findings_of_the_twin_are_shown(example):
    text = "The served chat template leaves out the system turn that the original's writes."
    evidence = {"chat": 2, "served": "<|user|>", "original": "<|system|>"}
    assert "leaves out" not in html(example)
    example["twin"]["findings"] = [{"name": "chat_template", "text": text, "evidence": evidence}]
    page = html(example)
    assert "The served chat template leaves out the system turn" in page
    assert "&lt;|system|&gt;" in page


@pytest.mark.usefixtures("undrawn")
def test_a_report_without_a_verdict_says_how_to_get_one(example):
    del example["verdict"]
    page = html(example)
    assert "No verdict" in page and "evaluate.policy" in page and "NO-GO" in page  # a rung's


@pytest.mark.parametrize(
    ("verdict", "shape", "sentence"),
    [
        ("GO", "go", "This model may go live."),
        ("NO-GO", "no", "This model must not go live."),
        ("INCONCLUSIVE", "open", "cannot tell whether"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_a_verdict_has_a_word_a_shape_and_a_sentence(example, verdict, shape, sentence):
    example["verdict"]["verdict"] = verdict
    page = html(example)
    badge = page[page.index('<span class="badge') :]
    badge = badge[: badge.index("</span>")]
    assert f'class="badge {shape}"' in badge and f'<svg class="{shape}"' in badge
    assert badge.endswith(verdict) and sentence in page


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_tokens_and_a_rung_that_failed_are_shown(example):
    run = example["load"]["runs"][0]
    run |= {"first_token_ms": None, "between_tokens_ms": None, "latency_ms": None, "goodput": None}
    run |= {"valid": False, "invalid_reasons": ["no token came"], "tokens_per_second": 0.0}
    rung = example["ladder"]["rows"][0]
    rung |= {"metrics": {}, "bytes": None, "tokens_per_second": None, "latency_p50_ms": None}
    rung |= {"verdict": None, "failure": "its server did not start"}
    example["ladder"] |= {"chosen": None, "settings": {}}
    example["ladder"]["measured_on"] = {"date": "2026-11-22T09:59:00+00:00", "client": {}}
    example["verdict"]["reasons"][0]["measured"] = None
    page = html(example)
    assert "Invalid: grpc, 1 client." in page and "no token came" in page
    assert "its server did not start" in page and "Take" not in page


@pytest.mark.usefixtures("undrawn")
def test_reasons_keep_the_order_of_the_gate(example):
    page = html(example)
    places = [page.index(reason["bound"]) for reason in example["verdict"]["reasons"]]
    assert places == sorted(places)


def nasty(value, key=""):
    """The report with a text in every place that would become a part of the page."""
    if isinstance(value, dict):
        return {
            (name + NASTY if key in ("tasks", "metrics", "evidence", "data") else name): nasty(
                inner, name
            )
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [nasty(inner, key) for inner in value]
    return value + NASTY if isinstance(value, str) and key not in MEANT else value


def test_nothing_in_a_report_becomes_a_part_of_the_page(example):
    example = {key: nasty(value, key) for key, value in example.items()}
    for task in example["tasks"].values():
        for side in ("metrics", "difference"):
            names = task["reference"][side]
            task["reference"][side] = {
                name if NASTY in name else name + NASTY: value for name, value in names.items()
            }
    page = html(example)
    assert "<img" not in page and "&lt;img" in page
    assert page.count("</script>") == page.count("<script>") == 1


@pytest.mark.usefixtures("undrawn")
def test_a_large_report_shows_the_first_items_and_says_so(example):
    lambada, translation = example["tasks"].values()
    item = lambada["items"][0]
    lambada["items"] = [{**item, "index": index} for index in range(5000)]
    lambada["reference"]["different"] = list(range(5000))
    lambada["reference"]["items"] = {str(index): item for index in range(5000)}
    answer = {**translation["items"][0], "prediction": "a word " * 5000}
    translation["items"] = [{**answer, "index": index} for index in range(5000)]
    page = html(example)
    assert len(page) < 2_000_000
    assert "The first 200 of 5,000" in page and "The first 100;" in page


@pytest.mark.usefixtures("undrawn")
def test_answers_stand_side_by_side_with_their_differences_marked(example):
    page = html(example)
    assert "Ein <mark>Hund</mark> rennt über<mark> saftig</mark> grünes" in page
    assert "Ein <mark>Boston Terrier</mark> rennt über grünes" in page


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        (0.34567, True, "34.6 %"),
        (None, False, "-"),
        (44.136, False, "44.14"),
        (0.0156, False, "0.0156"),
        (2.5e-5, False, "2.5e-05"),
        (25444.4, False, "25,444"),
        (0.0, False, "0.0000"),
    ],
)
def test_figures_are_as_precise_as_they_are_read(value, percent, text):
    assert formatted(value, percent) == text


def test_hardware_is_counted():
    ranks = [{"device": f"cuda:{number} (NVIDIA H200)"} for number in range(2)]
    assert hardware({"ranks": ranks}) == "2 x NVIDIA H200"
    assert hardware({"ranks": [{"device": "cpu"}]}) == "1 x cpu"
    both = {"ranks": ranks, "replicas": ["a:1", "b:1"]}
    assert hardware(both) == "2 servers, each on 2 x NVIDIA H200"
    assert hardware({}) == "unknown hardware"


def test_sizes_are_in_the_unit_that_fits():
    assert [size(count) for count in (2_630_000_000, 1_234_567, None)] == [
        "2.63 GB",
        "1.23 MB",
        "-",
    ]


@pytest.mark.usefixtures("undrawn")
def test_what_was_measured_on_the_same_stands_together(example):
    example["speed"]["measured_on"]["server"]["alive_at"] = "2026-11-22T09:14:31+00:00"
    example["load"]["measured_on"]["client"]["host"] = "node9"
    page = html(example)
    provenance = page[page.index('<h2 id="provenance">') :]
    groups = re.findall("<h3>(.*?)</h3>", provenance)
    assert groups == ["lambada, translation, twin, harness, speed", "load"]


def test_long_texts_are_cut():
    assert clipped("abc", 3) == "abc" and clipped("abcd", 3) == "abc …"


@pytest.mark.usefixtures("undrawn")
def test_the_price_of_a_million_tokens(example):
    # 2 GPUs at 3.60 USD an hour are 0.002 USD a second, in which 1,000 tokens are made.
    assert price_of(1000, 2, 3.6) == pytest.approx(2.0)
    table = cost_table(example)
    assert [row["what"] for row in table["rows"]] == ["grpc", "http", "gateway"]
    assert table["rows"][0]["cost"] == pytest.approx(3.5 / 3600 / 26199 * 1e6)
    assert "0.037 USD" in html(example)
    del example["load"]
    assert cost_table(example)["rows"][0]["what"] == "32 x 200 in, 200 out"


@pytest.mark.usefixtures("undrawn")
def test_without_a_price_the_page_says_how_to_give_one(example):
    example["load"]["measured_on"]["gpu_price"] = None
    assert cost_table(example)["rows"][0]["cost"] is None
    assert "evaluate.gpu_price" in html(example)


def test_every_gpu_of_every_replica_costs(example):
    server = example["load"]["measured_on"]["server"]
    server["ranks"] *= 2
    server["replicas"] = ["node3:8001", "node4:8001"]
    assert cost_table(example)["gpus"] == ["NVIDIA H200"] * 4


@pytest.mark.usefixtures("undrawn")
def test_a_server_on_processors_has_neither_cost_nor_floor(example):
    for section in (example["load"], example["speed"]):
        section["measured_on"]["server"]["ranks"] = [{"rank": 0, "host": "a", "device": "cpu"}]
    assert cost_table(example) is None and floor_table(example) is None
    assert TITLES["cost"] not in headings(html(example))


def test_floors_are_what_must_be_read_over_the_bandwidth(example):
    table = floor_table(example)
    # 20 steps, each with 2.63 GB of weights and one row's 70 tokens of 196,608 bytes, at 4.8 TB/s.
    assert table["rows"][0]["floor"] == "at least 11.0 ms"
    assert table["rows"][0]["share"] == pytest.approx(
        20 * (2.63e9 + 70 * 196608) / 4.8e12 / 21.6e-3
    )
    # 256 rows of 272 tokens in and 128 out, so of 336 on average.
    (most,) = [row for row in table["rows"] if row["what"] == "grpc, 256 clients"]
    step = (2.63e9 + 256 * 336 * 196608) / 4.8e12
    assert most["floor"] == f"at most {256 / step:,.0f} tokens/s"


def test_an_unknown_gpu_has_no_floor(example):
    example["speed"]["measured_on"]["server"]["ranks"][0]["device"] = "cuda:0 (NVIDIA X1)"
    assert "load" in example and not any(
        row["what"].startswith("a request") for row in floor_table(example)["rows"]
    )


PBTXT = """backend: "fastertransformer"
parameters { key: "tensor_para_size" value: { string_value: "2" } }
parameters { key: "pipeline_para_size" value: { string_value: "1" } }
parameters { key: "data_type" value: { string_value: "bf16" } }
"""
GPT_INI = "[gpt]\nhead_num=4\nsize_per_head=8\nnum_layer=3\nweight_data_type=fp32\n[extension]\n"
T5_INI = "[encoder]\n[decoder]\nnum_heads=2\nd_kv=8\nnum_layers=3\nweight_data_type=fp32\n"


def repository(folder, ini, files, **parameters):
    """A model whose files have as many bytes as `files` says; parameters: more of config.pbtxt."""
    model = folder / "tiny"
    (model / "1" / "2-gpu").mkdir(parents=True)
    line = 'parameters {{ key: "{}" value: {{ string_value: "{}" }} }}\n'
    more = "".join(line.format(*item) for item in parameters.items())
    (model / "config.pbtxt").write_text(PBTXT + more)
    (model / "1" / "2-gpu" / "config.ini").write_text(ini)
    for name, length in files.items():
        (model / "1" / "2-gpu" / name).write_bytes(bytes(length))
    return {"model_repository": str(folder)}


def test_a_step_of_a_gpt_reads_its_layers_and_its_head(tmp_path):
    files = {"model.layers.0.mlp.weight.0.bin": 400, "model.layers.0.mlp.weight.1.bin": 400}
    files |= {"model.wte.bin": 80, "model.wpe.bin": 1000, "manifest.json": 9}
    ready = repository(tmp_path / "tied", GPT_INI + "num_kv_heads=2\n", files)
    # Stored as fp32, read as bf16; two of K and V, 3 layers, 2 heads of 8, 2 bytes each.
    expected = {"step_bytes": 440.0, "token_bytes": 192.0, "ranks": 2}
    assert step_reads(ready, "tiny") == expected
    ready = repository(tmp_path / "head", GPT_INI, files | {"model.lm_head.weight.bin": 40})
    assert step_reads(ready, "tiny") == {"step_bytes": 420.0, "token_bytes": 384.0, "ranks": 2}
    ready = repository(tmp_path / "kept", GPT_INI, files, kv_cache_dtype="fp8")
    assert step_reads(ready, "tiny") == {"step_bytes": 440.0, "token_bytes": 192.0, "ranks": 2}


def test_a_step_of_a_t5_reads_its_decoder(tmp_path):
    files = {"encoder.block.0.bin": 1000, "decoder.block.0.layer.0.SelfAttention.qkv.bin": 100}
    files |= {
        "decoder.block.0.layer.1.EncDecAttention.k.weight.0.bin": 100,
        "lm_head.weight.bin": 8,
    }
    ready = repository(tmp_path, T5_INI, files)
    assert step_reads(ready, "tiny") == {"step_bytes": 54.0, "token_bytes": 192.0, "ranks": 2}


@pytest.mark.parametrize(
    ("ini", "parameters"),
    [
        (GPT_INI, {"int8_mode": "1"}),
        (GPT_INI, {"quantization": "fp8"}),
        (GPT_INI + "num_experts=8\n", {}),
        ("[gpt]\n", {}),
    ],
)
def test_what_a_step_reads_is_not_guessed(tmp_path, ini, parameters):
    assert step_reads(repository(tmp_path, ini, {}, **parameters), "tiny") is None
    assert step_reads({"model_repository": "/nowhere"}, "tiny") is None
    assert step_reads({}, "tiny") is None


def test_long_time_lines_become_means_over_equal_spans(example):
    run = example["load"]["runs"][0]
    run["timeline"] = [
        {"second": second, "requests": 1.0, "tokens": second % 2} for second in range(3600)
    ]
    assert len(plots.timeline(run, "long")) < 30_000
    assert "Between 0 to 0 tokens/s" in plots.timeline(run, "long")


def test_a_plot_takes_the_colours_of_its_page_and_says_what_it_shows(example):
    for plot in plots.speed(example["speed"]["rows"]):
        assert "var(--series-1)" in plot and "currentColor" in plot
        assert not re.search(r"#[0-9a-f]{6}[;\"]", plot)
        assert "<title>" in plot and "<desc>" in plot and "<style" not in plot
    assert plots.speed(example["speed"]["rows"]) == plots.speed(example["speed"]["rows"])


@pytest.fixture(scope="module")
def chromium(tmp_path_factory, example_page):
    """A browser with the example, and everything on it unfolded."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "report.html").write_text(example_page, encoding="utf-8")
    with browser(folder) as started:
        started.open((folder / "report.html").as_uri())
        yield started


def unfold(page, open_=True):
    page.run(f"document.querySelectorAll('details').forEach(d => d.open = {str(open_).lower()})")


def emulate(page, width, scheme="light", media="screen"):
    page.devtools(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 500,
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.devtools("Emulation.setEmulatedMedia", media=media, features=features)


@needs_browser
@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_the_page_is_never_wider_than_the_screen(chromium, width):
    emulate(chromium, width)
    unfold(chromium)
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not chromium.run(f"return {wide}")
    script = "return [...document.querySelectorAll('main *, header *')].filter(e => "
    script += "!e.closest('.scroll, svg') && e.getBoundingClientRect().right > innerWidth + 1)"
    assert chromium.run(script + ".map(e => e.outerHTML.slice(0, 80))") == []


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_figures_fit_their_cards_and_long_paths_their_lines(chromium, width):
    """Those of other reports are longer than the example's."""
    emulate(chromium, width)
    texts = {".figures .value": "1,234,567 tokens/s", "header p": "/results/" + "a_long_name_" * 9}
    for selector, text in texts.items():
        script = f"const e = document.querySelector({selector!r}); "
        before = chromium.run(script + f"const b = e.innerHTML; e.textContent = {text!r}; return b")
        try:
            assert chromium.run(script + "return e.scrollWidth <= e.clientWidth")
            assert chromium.run("return document.documentElement.scrollWidth") <= width
        finally:
            chromium.run(script + f"e.innerHTML = {before!r}")


CONTRAST = r"""
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const numbers = text => text.match(/[\d.]+/g).map(Number);
const ratio = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((m, n) => n - m);
  return (x + 0.05) / (y + 0.05); };
const ground = element => { for (let e = element; e; e = e.parentElement) {
  const found = numbers(getComputedStyle(e).backgroundColor);
  if (found.length < 4 || found[3] > 0) return found.slice(0, 3); } return [255, 255, 255]; };
"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_stand_out_from_what_is_behind_them(chromium, scheme):
    emulate(chromium, 1280, scheme)
    unfold(chromium)
    texts = chromium.run(
        CONTRAST
        + """const low = []; let seen = 0;
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
          const element = walk.currentNode.parentElement;
          if (!walk.currentNode.textContent.trim() || element.closest('script, title, desc, .skip'))
            continue;
          const style = getComputedStyle(element), size = parseFloat(style.fontSize);
          const colour = numbers(element.closest('svg') ? style.fill : style.color).slice(0, 3);
          const large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
          seen += 1;
          if (ratio(colour, ground(element)) < (large ? 3 : 4.5)) low.push(element.outerHTML);
        }
        return [seen, low];"""
    )
    assert texts[0] > 500 and texts[1] == []
    lines = chromium.run(
        CONTRAST
        + """const probe = document.body.appendChild(document.createElement('i'));
        const found = [1, 2, 3, 4, 5].map(n => { probe.style.color = `var(--series-${n})`;
          return ratio(numbers(getComputedStyle(probe).color), ground(probe)); });
        probe.remove(); return found;"""
    )
    assert min(lines) >= 3


@needs_browser
def test_paper_has_the_verdict_first_and_what_was_folded(chromium):
    # A4 less its margins, in CSS pixels.
    emulate(chromium, 688, "dark", media="print")
    unfold(chromium, False)
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert chromium.run(ground) == "rgb(255, 255, 255)"
    bottom = "document.querySelector('.verdict').getBoundingClientRect().bottom"
    assert 0 < chromium.run(f"return {bottom} + scrollY") < 1017
    visible = "return document.querySelector('{}').checkVisibility({{contentVisibilityAuto: true}})"
    assert chromium.run(visible.format("details.print .reasons li"))
    assert not chromium.run(visible.format("details:not(.print)"))
    assert not chromium.run(visible.format("nav"))
    wide = "return [...document.querySelectorAll('table')].filter(t => t.checkVisibility() && "
    wide += "t.getBoundingClientRect().right > 689).map(t => t.textContent.slice(0, 60))"
    assert chromium.run(wide) == []


@needs_browser
def test_a_price_is_typed_into_the_page(chromium):
    emulate(chromium, 1280)
    chromium.type("#price", "100")
    chromium.type("#gpus", "2")
    # 200 USD an hour for 26,199 tokens a second.
    assert chromium.text("[data-rate]") == "2.12 USD"
    chromium.run("document.querySelector('#price').value = ''")
    chromium.type("#gpus", "1")
    assert chromium.text("[data-rate]") == "-"


@needs_browser
def test_the_page_loads_nothing_and_the_browser_has_no_complaint(chromium):
    chromium.run("return location.reload()")
    chromium.wait_for("document.readyState == 'complete'")
    assert chromium.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert chromium.console() == []


@needs_browser
def test_the_page_can_be_read_without_eyes_and_without_a_mouse(chromium):
    unnamed = "return [...document.querySelectorAll('{}')].filter(e => !({})).length"
    for elements, condition in (
        ("svg", "e.getAttribute('aria-hidden') || e.querySelector('title') && e.role == 'img'"),
        (".scroll", "e.tabIndex == 0 && e.ariaLabel"),
        ("th", "e.scope"),
        ("input", "e.labels.length == 1"),
        ("section", "e.ariaLabel || document.getElementById(e.getAttribute('aria-labelledby'))"),
        ("nav a", "document.querySelector(e.getAttribute('href'))"),
    ):
        assert chromium.run(unnamed.format(elements, condition)) == 0, elements
    levels = chromium.run(
        "return [...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))"
    )
    steps = [after - before for before, after in itertools.pairwise(levels)]
    assert levels.count(1) == 1 and max(steps) == 1
    ids = chromium.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
