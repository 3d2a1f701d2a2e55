"""The page at `/`: what is in it, and what a person sees in a browser."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from launcher_scripts.gateway.app import make_app
from launcher_scripts.gateway.middleware import Keys
from tests.browser import Browser, browser, missing
from tests.gateway.fakes import GPT2, SETTINGS, FakeBackend, client_of, listening, served
from tests.processes import wait_for

KEY = "sk-alice-0123"
# What a page must show as it is, and not take for a part of itself.
TEXT = " <b>bold</b><img src=x onerror='document.title=1'> & words"
IDS = GPT2.encode(TEXT)
SERVERS = [
    {
        "address": "10.0.0.1:8001",
        "healthy": True,
        "running": 3,
        "outstanding_tokens": 1234,
        "cache_use": 0.3125,
        "models": ["tiny"],
    },
    {
        "address": "10.0.0.2:8001",
        "healthy": False,
        "running": 0,
        "outstanding_tokens": 0,
        "cache_use": None,
        "models": ["tiny"],
    },
]
needs_browser = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def test_the_page_needs_no_key_and_nothing_from_elsewhere() -> None:
    client = client_of(served(FakeBackend()), keys={"alice": KEY})
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"].split("; ")
    assert "default-src 'self' 'unsafe-inline'" in policy
    assert "frame-ancestors 'none'" in policy
    # No other host, no path that a proxy's prefix would break, no HTML made of texts, no storage.
    assert not re.search(r"//\w|(?:src|href)\s*=|@import|url\(", page.text)
    assert not re.search(r"ask\([`\"']/", page.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page.text)
    assert not re.search(r"localStorage|sessionStorage|cookie", page.text)
    assert client.get("/v1/models").status_code == 401
    assert client.post("/").status_code == 405
    assert 'requests_total{route="/",status="200"} 1.0' in client.get("/metrics").text


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(lambda _: IDS)


@pytest.fixture
def address(backend: FakeBackend) -> Iterator[str]:
    """A gateway with a key, one model for chats and one without a template, and two servers."""
    models = [served(backend, max_len=256), served(backend, "base", template=None, max_len=None)]
    app = make_app(models, SETTINGS, Keys({"alice": KEY}))
    replaced = {"/servers": _servers, "/clients": _clients}
    app.router.routes[:] = [route for route in app.router.routes if route.path not in replaced]
    app.router.routes.extend(Route(path, answer) for path, answer in replaced.items())
    with listening(app) as found:
        yield found


async def _servers(_: Request) -> JSONResponse:
    return JSONResponse({"servers": SERVERS})


async def _clients(_: Request) -> JSONResponse:
    tokens = {"requests": 12, "errors": 1, "prompt_tokens": 123456, "generated_tokens": 7890123}
    return JSONResponse({"clients": [{"client": "alice", **tokens, "last_seen": 1.8e9}]})


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def page(chromium: Browser, address: str) -> Browser:
    return opened(chromium, address)


def opened(chromium: Browser, address: str) -> Browser:
    """The page, with its key typed in and the models shown."""
    chromium.open(address)
    chromium.type("#key", KEY)
    chromium.run("document.activeElement.blur()")
    chromium.wait_for("document.querySelector('#models tr')")
    return chromium


def cells(page: Browser, table: str) -> list[list[str]]:
    script = "return [...document.querySelectorAll('{} tr')].map("
    script += "line => [...line.cells].map(cell => cell.textContent))"
    found: list[list[str]] = page.run(script.format(table))
    return found


def ask(page: Browser, prompt: str, tokens: int) -> None:
    """Type a prompt, and wait until its answer is at its end."""
    page.type("#tokens", str(tokens))
    page.type("#prompt", prompt)
    page.click("#send")
    page.wait_for("document.querySelector('#stop').disabled")


@needs_browser
def test_a_person_sees_what_is_wrong_without_a_key(chromium: Browser, address: str) -> None:
    chromium.open(address)
    chromium.wait_for("document.querySelector('#models-error').textContent")
    assert "Authorization" in chromium.text("#models-error")
    assert cells(chromium, "#models") == []


@needs_browser
def test_a_person_sees_models_and_servers(page: Browser) -> None:
    assert cells(page, "#models") == [["tiny", "256"], ["base", "not limited by the model"]]
    page.wait_for("!document.querySelector('#servers-section').hidden")
    assert cells(page, "#servers") == [
        ["10.0.0.1:8001", "healthy", "3", "1234", "31.3 %", "tiny"],
        ["10.0.0.2:8001", "no new work", "0", "0", "not known", "tiny"],
    ]
    page.wait_for("!document.querySelector('#rows').hidden")
    assert page.text("#rows") == "rows: 0 running, 0 waiting; 0.0 tokens/s"


@needs_browser
def test_a_person_sees_who_uses_the_models(page: Browser) -> None:
    page.wait_for("!document.querySelector('#clients-section').hidden")
    (row,) = cells(page, "#clients")
    assert row[:5] == ["alice", "12", "1", "123456", "7890123"]
    assert "2027" in row[5]


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_never_wider_than_the_screen(page: Browser, width: int) -> None:
    page.wait_for("!document.querySelector('#servers-section').hidden")
    page.wait_for("!document.querySelector('#clients-section').hidden")
    page.run("document.querySelector('#servers td').textContent = 'n'.repeat(90)")
    page.run("document.querySelector('#model').add(new Option('m'.repeat(90), '', true, true))")
    page.devtools(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 500,
    )
    try:
        assert page.run("return document.documentElement.scrollWidth") <= width
        script = "return [...document.querySelectorAll('body *')].filter(e => "
        script += "!e.closest('.wide') && e.getBoundingClientRect().right > innerWidth + 1)"
        assert page.run(script + ".map(e => e.outerHTML.slice(0, 80))") == []
    finally:
        page.devtools("Emulation.clearDeviceMetricsOverride")


@needs_browser
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_person_types_a_prompt_and_sees_the_text(
    page: Browser, backend: FakeBackend, kind: str
) -> None:
    page.run(f"document.querySelector('#kind').value = '{kind}'")
    ask(page, "Grüße <script>", 100)
    # As text, and no part of the page.
    assert page.text("#answer") == TEXT
    assert page.run("return document.querySelector('#answer').children.length") == 0
    assert page.text("#error") == ""
    (request,) = backend.requests
    prompt = "Grüße <script>"
    if kind == "chat":
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    assert GPT2.decode(request.prompt_ids) == prompt
    assert f"{len(request.prompt_ids)} prompt tokens, {len(IDS) + 1} tokens" in page.text(
        "#figures"
    )


@needs_browser
def test_an_answer_that_is_stopped_gives_up_its_row(page: Browser, backend: FakeBackend) -> None:
    backend.waits = True
    page.click("#send")
    page.wait_for("document.querySelector('#answer').textContent")
    assert backend.running == 1
    page.click("#stop")
    page.wait_for("document.querySelector('#error').textContent == 'stopped'")
    wait_for(lambda: backend.running == 0)
    assert TEXT.startswith(page.text("#answer"))


@needs_browser
def test_a_refused_prompt_says_why(page: Browser) -> None:
    ask(page, "Hello", 4000)
    assert "256" in page.text("#error")
    assert page.text("#answer") == ""


@needs_browser
def test_a_model_without_template_takes_no_chats(page: Browser) -> None:
    chat = "document.querySelector('#kind [value=chat]')"
    page.run("document.querySelector('#kind').value = 'chat'")
    script = "const list = document.querySelector('#model'); list.value = 'base'; "
    page.run(script + "list.dispatchEvent(new Event('change'))")
    page.wait_for(f"{chat}.disabled")
    assert page.run("return document.querySelector('#kind').value") == "completion"


@needs_browser
def test_the_browser_has_nothing_to_complain_about(chromium: Browser, address: str) -> None:
    chromium.console()
    page = opened(chromium, address)
    ask(page, "Hello", 100)
    # Those of the first questions, which have no key yet, and of an icon that is not there.
    expected = re.compile(r"status of 401|/favicon\.ico")
    assert [line for line in page.console() if not expected.search(line)] == []


def test_every_route_is_described() -> None:
    """Paths, methods and bodies; every reference leads to a schema."""
    client = client_of(served(FakeBackend()), keys={"alice": KEY})
    document = client.get("/openapi.json").json()
    gateway = client.app.state.gateway
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for route in gateway.routes:
        methods[route.path.replace(":path", "")] |= route.methods - {"HEAD"}
    assert document["paths"].keys() == methods.keys()
    for path, operations in document["paths"].items():
        assert {name.upper() for name in operations} == methods[path]
        assert all(operation["summary"] for operation in operations.values())
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= document["components"]["schemas"].keys()
    assert {"ChatBody", "MessagesBody", "ResponsesBody"} <= references
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"] and chat["properties"]["n"]["maximum"] == 128
    page = client.get("/docs")
    assert page.status_code == 200 and not re.search(r"//\w|(?:src|href)\s*=|innerHTML", page.text)
    assert client.get("/load").status_code == 401


@needs_browser
def test_the_described_routes_are_shown(chromium: Browser, address: str) -> None:
    chromium.open(address + "docs")
    chromium.wait_for("document.body.textContent.includes('max_completion_tokens')")
    assert "/v1/chat/completions/render" in chromium.text("#paths")
