"""Reports and policies of which the verdict is known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.options import build
from launcher_scripts.config.policy import (
    AgreementBounds,
    PolicySettings,
    ReferenceBounds,
    ReportBounds,
    read_policy,
)
from launcher_scripts.evaluation import __main__ as commands
from launcher_scripts.evaluation import gate
from launcher_scripts.evaluation.report import Report
from launcher_scripts.evaluation.tasks.task import fraction


def policy(**values: Any) -> PolicySettings:
    return build(PolicySettings, values, "the test's policy", key="evaluate.policy")


def task(right: int, items: int = 400, *, first: int = 0) -> dict[str, Any]:
    """A section of `items` items, of which `right` from `first` on are right."""
    flags = [first <= index < first + right for index in range(items)]
    metric = fraction(flags, "right answers")
    of_items = [{"index": n, "target": f"w{n}", "correct": flag} for n, flag in enumerate(flags)]
    return {"metrics": {"accuracy": vars(metric)}, "items": of_items, "reference": None}


def run(**changes: Any) -> dict[str, Any]:
    """A valid load run, with changes."""
    times = {"p50": 20.0, "p90": 30.0, "p99": 40.0, "mean": 22.0}
    return {
        "path": "gateway",
        "mode": "closed",
        "clients": 4,
        "rate": None,
        "requests": 100,
        "failed": 0,
        "requests_per_second": 9.0,
        "tokens_per_second": 180.0,
        "goodput": 8.5,
        "first_token_ms": times,
        "between_tokens_ms": times,
        "latency_ms": {name: 10 * value for name, value in times.items()},
        "valid": True,
        "invalid_reasons": [],
        **changes,
    }


def twin(findings: tuple[str, ...] = (), kl: float = 0.001, items: int = 50) -> dict[str, Any]:
    return {
        "findings": [{"name": name, "text": "It was found.", "evidence": {}} for name in findings],
        "items": [
            {"index": n, "kl": kl * (1 + n % 5), "top1": 0.98, "difference": 0.01 * (n % 3)}
            for n in range(items)
        ],
    }


def report(**sections: Any) -> dict[str, Any]:
    """A report that is all well, with other sections."""
    content = {"schema": 1, "model": "m", "tasks": {"lambada": task(300)}, "twin": twin()}
    return {**content, "load": {"runs": [run()]}, **sections}


ASKED = {
    "metrics": {"lambada": {"accuracy": {"min": 0.6}}},
    "load": {"max_first_token_ms": {"p99": 50.0}, "min_goodput": 5.0},
}


def judged(content: dict[str, Any], **values: Any) -> gate.Verdict:
    return gate.judge(content, policy(**values), Path())


def test_a_verdict_names_the_weights_that_were_measured() -> None:
    chain = {"system_fingerprint": "fp_ab", "manifest": "ab", "source": {"m": "blake3:cd"}}
    content = report()
    assert judged(content, **ASKED).served == []
    for section in (*content["tasks"].values(), content["load"]):
        section["measured_on"] = {"digests": {**chain, "data": {"items": "ef"}}}
    assert judged(content, **ASKED).served == [chain]
    content["load"]["measured_on"] = {"digests": {"manifest": "other"}}
    assert [each["manifest"] for each in judged(content, **ASKED).served] == ["ab", "other"]


def test_a_clean_run_is_a_go() -> None:
    verdict = judged(report(), **ASKED)
    assert (verdict.verdict, verdict.exit_code) == ("GO", 0), verdict.lines()
    assert [reason.bound for reason in verdict.reasons] == [
        "if_measured.twin.max_findings",
        "metrics.lambada.accuracy.min",
        "load.max_first_token_ms.p99",
        "load.min_goodput",
        "if_measured.twin.max_kl",
        "if_measured.twin.min_top1",
        "if_measured.load.max_failed",
        "if_measured.load.max_invalid",
    ]
    assert verdict.lines()[0] == "GO: 8 of 8 bounds hold"


@pytest.mark.parametrize(
    ("sections", "bound", "says"),
    [
        (
            {"tasks": {"lambada": task(200)}},
            "metrics.lambada.accuracy.min",
            "lambada's accuracy is 50 % (95 % interval 45.12 % to 54.88 %, 400 items, Wilson); "
            "at least 60 % is asked",
        ),
        (
            {"twin": twin(("lost_bos",))},
            "if_measured.twin.max_findings",
            "the number of findings of the twin is 1; at most 0 is asked; lost_bos: It was found.",
        ),
        (
            {"load": {"runs": [run(), run(first_token_ms={"p99": 70.0})]}},
            "load.max_first_token_ms.p99",
            "the time to the first token under load (p99) is 70 ms; at most 50 ms is asked",
        ),
        (
            {"load": {"runs": [run(), run(failed=3)]}},
            "if_measured.load.max_failed",
            "the number of failed requests is 3; at most 0 is asked; of 200 requests",
        ),
        (
            {"twin": twin(kl=0.5)},
            "if_measured.twin.max_kl",
            "the mean KL divergence from the twin is 1.5 (95 % interval ",
        ),
        (
            {"load": {"runs": [run(goodput=2.0)]}},
            "load.min_goodput",
            "the best goodput of the load test is 2; at least 5 is asked",
        ),
    ],
)
def test_a_fault_is_a_no_go_with_its_reason(
    sections: dict[str, Any], bound: str, says: str
) -> None:
    verdict = judged(report(**sections), **ASKED)
    assert (verdict.verdict, verdict.exit_code) == ("NO-GO", 1)
    assert [one.bound for one in verdict.reasons if one.level == "fail"] == [bound]
    assert verdict.reasons[0].text.startswith(says)


def test_what_the_twin_has_found_comes_before_what_it_explains() -> None:
    found = report(tasks={"lambada": task(200)}, twin=twin(("swapped_shard",), kl=0.5))
    verdict = judged(found, **ASKED)
    assert [one.bound for one in verdict.reasons if one.level == "fail"] == [
        "if_measured.twin.max_findings",
        "metrics.lambada.accuracy.min",
        "if_measured.twin.max_kl",
    ]


def write(path: Path, **sections: Any) -> str:
    path.write_text(json.dumps(report(**sections)))
    return str(path)


def test_a_drop_from_an_earlier_report_is_a_no_go(tmp_path: Path) -> None:
    """60 of 400 items were lost and 20 won: 10 points, 5.8 at least."""
    earlier = write(tmp_path / "report.json", tasks={"lambada": task(300, first=20)})
    content = report(tasks={"lambada": task(260)})
    verdict = judged(content, baseline={"report": earlier, "max_drop": 0.02})
    assert verdict.verdict == "NO-GO"
    assert verdict.reasons[0].text == (
        f"the drop of lambada's accuracy from {earlier} is 10 % (95 % interval 5.773 % to "
        "14.42 %, 400 items, Tango); at most 2 % is asked; 60 lost, 20 won, McNemar's p 8.6e-06"
    )


def test_an_undersized_run_says_how_many_items_it_takes(tmp_path: Path) -> None:
    earlier = write(tmp_path / "report.json", tasks={"lambada": task(3, 4)})
    content = report(tasks={"lambada": task(3, 4)})
    verdict = judged(content, baseline={"report": earlier, "max_drop": 0.02})
    assert (verdict.verdict, verdict.exit_code) == ("INCONCLUSIVE", 2)
    assert verdict.reasons[0].text.endswith(
        "at most 2 % is asked; 0 lost, 0 won, McNemar's p 1; "
        "it takes about 189 items like these to decide it"
    )
    enough = {"lambada": task(150, 189)}
    earlier = write(tmp_path / "report.json", tasks=enough)
    verdict = judged(report(tasks=enough), baseline={"report": earlier, "max_drop": 0.02})
    assert verdict.verdict == "GO"


def test_few_items_show_nothing_about_a_mean() -> None:
    verdict = judged(report(twin=twin(items=12)))
    texts = [one.text for one in verdict.reasons if one.level == "inconclusive"]
    assert verdict.verdict == "INCONCLUSIVE" and len(texts) == 2
    assert all("it takes about 30 items like these" in text for text in texts)
    assert judged(report(twin=twin(items=12)), min_items=12).verdict == "GO"


def test_a_failed_bound_outweighs_an_open_one() -> None:
    content = report(tasks={"lambada": task(3, 4)}, twin=twin(("tokenizer",)))
    verdict = judged(content, metrics={"lambada": {"accuracy": {"min": 0.7}}})
    levels = [one.level for one in verdict.reasons]
    assert verdict.verdict == "NO-GO" and levels[:2] == ["fail", "inconclusive"]
    assert levels == sorted(levels, key=gate.LEVELS.index)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"twin": {"max_kl": 1.0}}, "was not measured; evaluate.twin measures it"),
        ({"load": {"min_goodput": 1.0}}, "was not measured; evaluate.load measures it"),
        ({"speed": {"max_latency_ms": {"p50": 9}}}, "evaluate.benchmark measures it"),
        ({"metrics": {"squad": {"f1": {"min": 0.5}}}}, "evaluate.tasks.squad measures it"),
        ({"harness": {"boolq": {"acc": {"min": 0.5}}}}, "evaluate.harness.tasks with boolq"),
        ({"metrics": {"lambada": {"f1": {"min": 0.5}}}}, "the figures of lambada are accuracy"),
        ({"reference": {"max_drop": 0.1}}, "evaluate.tasks.<task>.reference of a task that has it"),
        ({"metrics": {"lambada": {"accuracy": {"max_drop": 0.1}}}}, "evaluate.policy.baseline or"),
    ],
)
def test_what_was_not_measured_leaves_the_verdict_open(values: dict[str, Any], says: str) -> None:
    content = {"tasks": {"lambada": task(300)}}
    verdict = judged(content, **values)
    (reason,) = verdict.reasons
    assert (verdict.verdict, reason.level, reason.measured) == (
        "INCONCLUSIVE",
        "inconclusive",
        None,
    )
    assert says in reason.text
    assert judged(content, if_measured=values).reasons[0].bound == ""


def test_a_bound_that_no_task_can_answer_is_open(tmp_path: Path) -> None:
    """boolq's items have no log-likelihoods."""
    tasks = {"boolq": task(300)}
    earlier = write(tmp_path / "report.json", tasks=tasks)
    bounds = {"report": earlier, "min_agreement": 0.9, "max_log_likelihood_difference": 0.1}
    verdict = judged(report(tasks=tasks), baseline=bounds)
    (open_one,) = (one for one in verdict.reasons if one.level == "inconclusive")
    assert open_one.bound == "baseline.max_log_likelihood_difference"
    (held,) = (one for one in verdict.reasons if one.bound == "baseline.min_agreement")
    assert (held.level, held.measured) == ("pass", 1.0)


def test_a_task_that_is_gone_since_the_baseline_is_open(tmp_path: Path) -> None:
    earlier = write(tmp_path / "report.json", tasks={"boolq": task(9), "lambada": task(300)})
    verdict = judged(report(), baseline={"report": earlier, "max_drop": 0.02})
    says = f"boolq of {earlier} was not measured; evaluate.tasks.boolq measures it"
    assert [one.text for one in verdict.reasons if one.level == "inconclusive"] == [says]
    elsewhere = [{**item, "target": "other"} for item in task(300)["items"]]
    other = write(tmp_path / "report.json", tasks={"lambada": {**task(300), "items": elsewhere}})
    verdict = judged(report(), baseline={"report": other, "max_drop": 0.02})
    assert verdict.reasons[0].text.endswith(f"{other} has no item in common with it")


def test_a_figure_without_an_interval_is_open() -> None:
    metric = {"value": 30.0, "low": None, "high": None, "percent": False, "meaning": ""}
    items = [{"index": n, "prediction": "p"} for n in range(50)]
    tasks = {"translation": {"metrics": {"bleu": metric}, "items": items, "reference": None}}
    verdict = judged({"tasks": tasks}, metrics={"translation": {"bleu": {"min": 20.0}}})
    assert verdict.verdict == "INCONCLUSIVE"
    assert verdict.reasons[0].text.endswith("the report has no interval of it")


def test_only_the_runs_that_are_chosen_count() -> None:
    content = report(load={"runs": [run(), run(path="grpc", first_token_ms={"p99": 900.0})]})
    bound = {"max_first_token_ms": {"p99": 50.0}}
    assert judged(content, load=bound).verdict == "NO-GO"
    assert judged(content, load={**bound, "path": "gateway"}).verdict == "GO"
    assert judged(content, load={**bound, "clients": 64}).verdict == "INCONCLUSIVE"


def test_what_a_search_overloaded_does_not_count() -> None:
    overloaded = run(clients=16, failed=5, valid=False, invalid_reasons=["5 failed."])
    full = {"path": "gateway", "clients": 8, "rate": None, "text": "16 clients fail."}
    runs = [run(), run(clients=8), overloaded]
    assert judged(report(load={"runs": runs, "saturation": None})).verdict == "NO-GO"
    assert judged(report(load={"runs": runs, "saturation": full})).verdict == "GO"
    elsewhere = {**full, "path": "grpc"}
    assert judged(report(load={"runs": runs, "saturation": elsewhere})).verdict == "NO-GO"


def test_a_perplexity_is_worse_when_it_rises(tmp_path: Path) -> None:
    def section(shift: float) -> dict[str, Any]:
        items = [
            {"index": n, "target": "w", "log_likelihood": -3.0 - n % 7 - shift} for n in range(100)
        ]
        metric = {"value": 400.0, "low": 300.0, "high": 500.0, "percent": False, "meaning": ""}
        return {"metrics": {"perplexity": metric}, "items": items, "reference": None}

    earlier = write(tmp_path / "report.json", tasks={"lambada": section(0.0)})
    baseline = {"report": earlier, "max_drop": 0.02, "max_log_likelihood_difference": 0.2}
    worse = judged(report(tasks={"lambada": section(0.1)}), baseline=baseline)
    failed = [one for one in worse.reasons if one.level == "fail"]
    assert [one.measured for one in failed] == [pytest.approx(math.exp(0.1) - 1)]
    better = judged(report(tasks={"lambada": section(-0.1)}), baseline=baseline)
    assert better.verdict == "GO"


def test_figures_of_all_items_together_are_compared_by_their_intervals(tmp_path: Path) -> None:
    def section(bleu: float) -> dict[str, Any]:
        metric = {"value": bleu, "low": bleu - 1, "high": bleu + 1, "percent": False, "meaning": ""}
        items = [{"index": n, "target": "t", "prediction": "p"} for n in range(300)]
        return {"metrics": {"bleu": metric}, "items": items, "reference": None}

    earlier = write(tmp_path / "report.json", tasks={"translation": section(25.0)})
    for bleu, verdict in ((26.0, "GO"), (24.5, "INCONCLUSIVE"), (20.0, "NO-GO")):
        content = report(tasks={"translation": section(bleu)})
        assert judged(content, baseline={"report": earlier, "max_drop": 0.02}).verdict == verdict


def test_tasks_of_the_harness_are_paired_by_their_samples(tmp_path: Path) -> None:
    def section(folder: Path, right: int) -> dict[str, Any]:
        (folder / "harness").mkdir(parents=True)
        samples = [
            {"doc_id": n, "target": "x", "filter": name, "acc": float(n < many), "perplexity": -n}
            for n in range(300)
            for name, many in (("none", right), ("strict", 150))
        ]
        lines = "".join(json.dumps(one) + "\n" for one in samples)
        (folder / "harness" / "samples.jsonl").write_text(lines)
        share = right / 300
        metric = {"value": share, "low": 0.0, "high": 1.0, "percent": True, "meaning": ""}
        metrics = {"acc": metric, "acc,strict": metric, "perplexity": {**metric, "percent": False}}
        boolq = {"metrics": metrics, "items": 300, "samples": "samples.jsonl"}
        content = report(harness={"tasks": {"boolq": boolq}})
        (folder / "report.json").write_text(json.dumps(content))
        return content

    section(tmp_path / "before", 240)
    bounds = {"report": str(tmp_path / "before" / "report.json"), "max_drop": 0.02}
    content = section(tmp_path / "after", 200)
    asked = policy(baseline=bounds, harness={"boolq": {"acc": {"min": 0.6}}})
    verdict = gate.judge(content, asked, tmp_path / "after")
    assert verdict.verdict == "NO-GO"
    assert "40 lost, 0 won" in verdict.reasons[0].text
    drops = {one.text.split(" from ")[0]: one for one in verdict.reasons if "drop" in one.text}
    strict, perplexity = (
        drops["the drop of boolq's acc,strict"],
        drops["the drop of boolq's perplexity"],
    )
    assert "300 items, Tango); at most 2 % is asked; 0 lost, 0 won" in strict.text
    assert perplexity.measured == 0.0 and "bootstrap" in perplexity.text
    (share,) = (one for one in verdict.reasons if one.bound == "harness.boolq.acc.min")
    assert "66.67 % (95 % interval 61.15 % to 71.76 %, 300 items, Wilson)" in share.text


def test_the_order_of_the_bounds_does_not_matter() -> None:
    """Any order of the policy's keys gives the same verdict, with the same reasons."""
    content = report(tasks={name: task(300) for name in ("boolq", "lambada", "squad")})
    figures = {name: {"accuracy": {"min": low}} for name, low in (("boolq", 0.9), ("squad", 0.74))}
    values = {**ASKED, "metrics": {**ASKED["metrics"], **figures}, "twin": {"max_kl": 0.1}}
    expected = judged(content, **values).reasons
    assert {one.level for one in expected} == set(gate.LEVELS)
    shuffler = random.Random(0)
    for _ in range(20):
        assert judged(content, **_shuffled(values, shuffler)).reasons == expected


def _shuffled(values: Any, shuffler: random.Random) -> Any:
    if not isinstance(values, dict):
        return values
    items = list(values.items())
    shuffler.shuffle(items)
    return {name: _shuffled(value, shuffler) for name, value in items}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "metric: {}",
            "unknown key metric; choices: baseline, harness, if_measured, load, metrics",
        ),
        ("twin: {max_kll: 1}", "unknown key twin.max_kll; choices: max_findings, max_kl"),
        ("baseline: {max_drop: 0.1}", "missing key baseline.report"),
        ("reference: {max_drop: 2}", "max_drop is a fraction, 0 to 1; got 2.0"),
        ("load: {min_goodput: -1}", "min_goodput must be at least 0; got -1.0"),
        ("load: {path: rest}", "unknown path; got 'rest'; choices: grpc, http, gateway"),
        ("twin: {max_kl: .nan}", "max_kl must be finite"),
        ("metrics: {lambada: {accuracy: 0.6}}", "metrics.lambada.accuracy must be a mapping"),
        ("[1", "cannot read the policy"),
    ],
)
def test_mistakes_in_a_policy_are_answered(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_policy(tmp_path / "policy.yaml")
    assert says in str(raised.value)


def test_opening_a_report_withdraws_its_verdict(tmp_path: Path) -> None:
    Report(tmp_path, "m").add_verdict(judged(report()))
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == written
    assert (written["verdict"], written["exit_code"]) == ("GO", 0)
    assert written["policy"]["min_items"] == 30
    opened = Report(tmp_path, "m")
    assert "verdict" not in opened.content and not (tmp_path / "verdict.json").exists()


def test_a_report_can_be_judged_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # These sections hold what the gate reads, and less than the page.
    monkeypatch.setattr("launcher_scripts.evaluation.report.html", lambda _: "")
    path = write(tmp_path / "report.json", tasks={})
    assert commands.main(["judge", path]) == 0
    assert capsys.readouterr().out.startswith("GO: 5 of 5 bounds hold\n  pass: ")
    (tmp_path / "policy.yaml").write_text("load: {min_goodput: 100}")
    assert commands.main(["judge", path, "--policy", str(tmp_path / "policy.yaml")]) == 1
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "NO-GO"
    (tmp_path / "policy.yaml").write_text("metrics: {lambada: {accuracy: {min: 0.1}}}")
    assert commands.main(["judge", path, "--policy", str(tmp_path / "policy.yaml")]) == 2


def test_what_cannot_be_judged_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["judge", str(tmp_path / "report.json")]) == 3
    assert "there is no report; got '" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="3"):
        commands.main(["judge"])


def test_the_documented_policy_is_one(checkout: Path, tmp_path: Path) -> None:
    text = (checkout / "docs" / "verdict.md").read_text(encoding="utf-8")
    example = text.partition("### The policy")[2].partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "policy.yaml").write_text(example)
    documented = read_policy(tmp_path / "policy.yaml")
    assert documented.twin == ReferenceBounds(0.02, 0.95, 1.0, 0)
    assert documented.if_measured == ReportBounds(reference=AgreementBounds(max_drop=0.02))


def test_an_invalid_load_test_decides_nothing() -> None:
    invalid = run(valid=False, invalid_reasons=["No token came."])
    verdict = judged(report(load={"runs": [run(), invalid]}), **ASKED)
    assert (verdict.verdict, verdict.exit_code) == ("INCONCLUSIVE", 2)
    (text,) = (reason.text for reason in verdict.reasons if reason.bound.endswith("max_invalid"))
    assert text.startswith("the number of invalid runs is 1; at most 0 is asked; No token came.; ")
    assert "measure again with fewer clients" in text
    worse = judged(report(load={"runs": [run(failed=1), invalid]}), **ASKED)
    assert worse.verdict == "NO-GO"
