"""Make docs/gateway.png of a running gateway: python3 -m tests.gateway.make_screenshot URL FILE

The first model answers a chat where it takes one, else a completion; the picture is of the page
while the answer comes and a server has work.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser import browser

WIDTH, HEIGHT = 900, 960
TOKENS = 200


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
        page.type("#prompt", "How does a rainbow come about?")
        page.type("#temperature", "0")
        page.click("#send")
        # The load is asked for every few seconds.
        page.wait_for(
            "document.querySelector('#answer').textContent.length > 100 &&"
            "Number(document.querySelector('#servers tr')?.cells[2].textContent) > 0 &&"
            "parseFloat(document.querySelector('#servers tr').cells[4].textContent) > 0"
        )
        page.screenshot(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
