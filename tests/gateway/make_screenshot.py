"""Make docs/gateway.png of a running gateway: python3 -m tests.gateway.make_screenshot URL FILE

The page is given a chat where the first model takes one, else a completion.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.gateway.browser import browser

WIDTH, HEIGHT = 900, 940
TOKENS = 48


def main(address: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        page.resize(WIDTH, HEIGHT)
        page.open(address)
        page.wait_for("document.querySelector('#models tr')")
        page.run(
            "const kind = document.querySelector('#kind');"
            "if (!kind.querySelector('[value=chat]').disabled) kind.value = 'chat'"
        )
        page.type("#tokens", str(TOKENS))
        page.type("#prompt", "What is the capital of France?")
        page.type("#temperature", "0")
        page.click("#send")
        page.wait_for("document.querySelector('#figures').textContent")
        page.screenshot(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
