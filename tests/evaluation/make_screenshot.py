"""Make a picture of a report: python3 -m tests.evaluation.make_screenshot REPORT.json FILE.png

docs/report.png is of tests/evaluation/example_report.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from launcher_scripts.evaluation.page import html
from tests.browser import browser

WIDTH, HEIGHT = 1080, 1060


def main(report: Path, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        content = json.loads(report.read_text(encoding="utf-8"))
        path = Path(folder) / "report.html"
        path.write_text(html(content), encoding="utf-8")
        page.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTH,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=True,
        )
        page.open(path.as_uri())
        page.screenshot(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
