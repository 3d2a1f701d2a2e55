"""The certificate of a served model: a statement of equivalence with its original, in one file.

It says what was tested and how, where the two differ if they do, and by digests of which source,
export, server, tokenizer and texts. docs/certificate.md describes every key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.files import CHAIN, atomic_write, parse_json, read_plain, value_digest
from launcher_scripts.evaluation.tasks.logits import (
    Equivalence,
    RowComparison,
    design_effect,
    equivalence,
)
from launcher_scripts.evaluation.tasks.task import mean, share
from launcher_scripts.evaluation.twin.faults import Fault

FOLDER, FILE_NAME = "certificate", "certificate.json"
SCHEMA = 1
EQUIVALENT, DIFFERENT, INCONCLUSIVE = STATEMENTS = ("equivalent", "different", "inconclusive")
SIGNED_KEY = "evaluate.twin.sign"


def measurements(rows: Sequence[RowComparison], margin: float, alpha: float) -> dict[str, Any]:
    """Return the test, the flips and the divergence of the rows, one a text, as plain values."""
    test = equivalence(rows, margin, alpha)
    flips = [np.asarray(~row.same, dtype=np.float64) for row in rows]
    positions = sum(len(row) for row in flips)
    count, effect = int(sum(row.sum() for row in flips)), design_effect(flips)
    # Positions of a text flip together: they count as fewer that are independent.
    independent = max(1, round(positions / effect))
    interval = share(round(count / positions * independent), independent)
    divergence = mean([float(row.kl.mean()) for row in rows])
    return {
        "test": {**vars(test), "p": test.p, "statement": _of_test(test)},
        "flips": {
            "count": count,
            "positions": positions,
            "share": count / positions,
            "low": interval.low,
            "high": interval.high,
            "design_effect": effect,
        },
        "kl": {
            "mean": float(np.concatenate([row.kl for row in rows]).mean()),
            "low": divergence.low,
            "high": divergence.high,
            "max": float(max(row.kl.max() for row in rows)),
        },
    }


def _of_test(test: Equivalence) -> str:
    if test.equivalent:
        return EQUIVALENT
    return DIFFERENT if test.different else INCONCLUSIVE


def statement(test: Mapping[str, Any], faults: Sequence[Fault]) -> str:
    """Return the statement of a certificate: a fault makes two models different."""
    return DIFFERENT if faults else str(test["statement"])


def certificate(model: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the certificate of a report's section `twin`, as plain values."""
    on, record = section["measured_on"], section["certificate"]
    digests, server = on["digests"], on["server"]
    versions = server.get("versions", {})
    content = {
        "schema": SCHEMA,
        "model": model,
        "date": on["date"],
        "source": section["source"],
        "reference": section["reference"],
        **record,
        "digests": {
            **{name: digests.get(name) for name in CHAIN},
            "tokenizer": digests.get("tokenizer"),
            "chat_template": digests.get("chat_template"),
            "texts": digests.get("data"),
            "server": value_digest(
                {"versions": versions, "parameters": on["parameters"], "model": model}
            ),
        },
        "server": {"versions": versions, "ranks": server.get("ranks", [])},
        "parameters": on["parameters"],
        "client": on["client"],
    }
    return json.loads(json.dumps(content))  # type: ignore[no-any-return]


def write_certificate(results_dir: Path, content: Mapping[str, Any]) -> Path:
    """Write certificate/certificate.json below the results; returns its folder."""
    folder = results_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():  # of an earlier certificate, which a signature may cover
        old.unlink()
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    atomic_write(folder / FILE_NAME, text + "\n")
    return folder


def read(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of a certificate and its content; path: the file or its folder.

    Raises ConfigError for what is not a certificate.
    """
    inner = (path / FILE_NAME, path / FOLDER / FILE_NAME)
    file = next((item for item in inner if item.is_file()), path)
    try:
        content = parse_json(read_plain(file))
        schema, word = content["schema"], content["statement"]
        if schema != SCHEMA or word not in STATEMENTS or not isinstance(content["digests"], dict):
            raise ValueError(f"it has schema {schema} and the statement {word!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{file} is not a certificate: {type(error).__name__}: {error}"
        raise ConfigError(problem(message, change="the command line")) from error
    return file, content


def lines(content: Mapping[str, Any]) -> list[str]:
    """Return the certificate in words."""
    test, flips, kl = content["test"], content["flips"], content["kl"]
    interval = "no interval" if test["low"] is None else f"{test['low']:.2g} to {test['high']:.2g}"
    result = [
        f"{content['statement']}: mean log-probability difference {test['mean']:.2g} ({interval}, "
        f"margin {test['margin']:g}) nats a token, p {test['p']:.2g}, "
        f"{test['positions']} positions of {test['texts']} texts",
        f"flips: {flips['count']} of {flips['positions']} (95 %: {flips['low']:.2%} to "
        f"{flips['high']:.2%}); KL {kl['mean']:.2g}, at most {kl['max']:.2g} nats",
    ]
    layers = content["layers"]
    if "skipped" in layers:
        result.append(f"layers: not compared: {layers['skipped']}")
    else:
        worst = max(layers["errors"], key=lambda row: row["error"])
        result.append(
            f"layers: {len(layers['errors'])} states compared, largest error "
            f"{worst['error']:.2g} (limit {layers['limit']:.2g})"
        )
    return result + [f"{fault['part']}: {fault['text']}" for fault in content["faults"]]
