"""Every shared NeMo fixture and golden case, exported and verified: what came of it.

    python3 -m tests.checkpoint.export_table [NAME ...]

prints one line per checkpoint. A fixture is verified against its source (`verify`); where another
one is the same model in another wrapping or division, the digests must agree; an adapter goes
on the base it was trained on, and must be refused alone. A golden case must have the digests that
the original wrote.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import LauncherError
from launcher_scripts.config.settings import TokenizerSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.golden_cases import digests, found_digests
from tests.checkpoint.test_fixtures import SAME as SAME_GPT
from tests.checkpoint.test_nemo_adapters import FIXTURES as LEARNED

SHARED = Path(__file__).resolve().parents[3] / "shared"
TP_SIZES = (1, 2)
SAME = {
    **SAME_GPT,
    "t5_sp_learned_shared_tp2pp2_nemo1.18.1": "t5_sp_learned_shared_nemo1.18.1",
    "t5_sp_relative_geglu_untied_tp2_nemo1.18.1": "t5_sp_relative_geglu_untied_nemo1.18.1",
}
IDS = TokenizerSettings("none", start_id=60, end_id=61, pad_id=62)


def fixture_result(name: str, folder: Path) -> str:
    """What came of one fixture at every tensor-parallel size."""
    if name in LEARNED:
        return _adapter_result(name, folder)
    source = _source(SHARED / "fixtures" / "nemo" / name)
    for tp_size in TP_SIZES:
        exported = _quiet(source, folder / str(tp_size), tp_size, verify=True)
        if name in SAME:
            twin = _source(SHARED / "fixtures" / "nemo" / SAME[name])
            expected = found_digests(_quiet(twin, folder / f"twin{tp_size}", tp_size))
            if found_digests(exported) != expected:
                raise RuntimeError(f"other bytes than {SAME[name]} at TP {tp_size}")
    return "ok, verified" + (f"; bytes of {SAME[name]}" if name in SAME else "")


def _adapter_result(name: str, folder: Path) -> str:
    nemo = SHARED / "fixtures" / "nemo"
    base = json.loads((nemo / name / "MANIFEST.json").read_text())["base_model_fixture"]
    part = _source(nemo / name)
    try:
        _quiet(part, folder / "alone", 1)
    except LauncherError:
        pass
    else:
        raise RuntimeError("was exported without its base")
    for tp_size in TP_SIZES:
        more = {LEARNED[name]: (str(part),), "verify": True}
        _quiet(_source(nemo / base), folder / str(tp_size), tp_size, **more)
    return f"ok, verified, on {base}; alone refused"


def golden_result(name: str, folder: Path) -> str:
    """How the files compare with those that the original wrote."""
    case = SHARED / "golden" / name
    given = case / "input"
    source = next(p for p in (given / "m.nemo", given / "ck", given / "hf") if p.exists())
    more: dict[str, Any] = {
        "tokenizer": IDS if given.joinpath("m.nemo").exists() else TokenizerSettings("none"),
        "encoder_only": "encoder" in name,
        "num_attention_heads": 4 if source.name == "ck" else None,
        "ia3_checkpoints": tuple(map(str, sorted(given.glob("ia3*.nemo")))),
        "prompt_checkpoints": tuple(map(str, given.glob("p.nemo"))),
        "verify": True,
    }
    tp_size = int(name.partition("_to")[2][:1]) if "_to" in name else 1
    exported = _quiet(source, folder, tp_size, "fp16" if "fp16" in name else "fp32", **more)
    found, expected = found_digests(exported), digests(case)
    differing = {file for file in {*found, *expected} if found.get(file) != expected.get(file)}
    if differing:
        raise RuntimeError(f"{len(differing)} of {len(expected)} digests differ: {differing}")
    return f"{len(expected)} of {len(expected)} digests identical"


def _source(folder: Path) -> Path:
    members = ("model.nemo", "model", "checkpoints")
    return next(folder / member for member in members if (folder / member).exists())


def _quiet(source: Path, target: Path, tp_size: int, data_type: str = "fp32", **more: Any) -> Path:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return export_folder(source, target, tp_size, data_type, **more)


def main(names: Sequence[str]) -> int:
    rooms = {"fixtures/nemo": fixture_result, "golden": golden_result}
    failed = 0
    print("| checkpoint | result |\n|---|---|")
    for room, result in rooms.items():
        for path in sorted((SHARED / room).iterdir()):
            if not path.is_dir() or (names and path.name not in names):
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    text = result(path.name, Path(folder))
                except Exception as error:
                    text = f"{type(error).__name__}: {error}".splitlines()[0]
                    failed += 1
            print(f"| {path.name} | {text} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
