"""A ladder of precisions: its configurations, its chain of jobs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launcher_scripts.common.errors import ConfigError
from tests.conftest import Golden
from tests.login.conftest import LOCAL, Planner, Run
from tests.login.test_golden import BASE, folder_of
from tests.login.test_interactive import assert_ended

LADDER = "evaluate.ladder=[fp32,bf16,int8]"
STAGES = "stages=[export,deploy,evaluate]"
SUMMARIES = ("fp32_fp32", "bf16_bf16", "bf16_bf16_int8")


@pytest.mark.parametrize("cluster", ["bcm", "bcp", "interactive"])
def test_the_comparison_has_golden_files(plan: Planner, golden: Golden, cluster: str) -> None:
    made = plan(*BASE, LADDER, f"cluster_type={cluster}")
    jobs = list(made.jobs(folder_of))
    assert [job.stage for job in jobs] == ["export", "deploy", "evaluate"] * 3 + ["ladder"]
    (settings,) = jobs[-1].settings_files().values()
    golden(f"{cluster}/ladder.sh", made.cluster.render(jobs[-1]))
    golden(f"{cluster}/ladder_hydra.yaml", settings)


def test_every_rung_has_its_precision_its_folders_and_its_names(plan: Planner) -> None:
    jobs = list(plan(*BASE, LADDER).jobs(folder_of))
    exports = [job.settings for job in jobs if job.stage == "export"]
    types = [(each.weight_data_type, each.data_type, each.quantization) for each in exports]
    assert types == [("fp32", "fp32", None), ("bf16", "bf16", None), ("bf16", "bf16", "int8")]
    assert all(each.reuse for each in exports)
    folders = [job.settings.results_dir for job in jobs if job.stage == "evaluate"]
    results = "/mount/results/gpt3_126m/evaluate_tp2_pp1_"
    assert folders == [f"{results}{summary}" for summary in SUMMARIES]
    names = [job.name for job in jobs[3:6]]
    assert names == [f"{stage}_gpt3_126m_bf16" for stage in ("export", "deploy", "evaluate")]
    assert [number for number, job in enumerate(jobs) if job.after_any] == [3, 6, 9]
    half = "export.triton_deployment.data_type=bf16"
    (fp8, *_) = plan(*BASE, "evaluate.ladder=[fp8]", half).jobs(folder_of)
    settings = fp8.settings
    assert (settings.weight_data_type, settings.data_type) == ("bf16", "bf16")
    assert settings.quantization == "fp8" and "_fp8/" in settings.triton_model_dir
    (kept, *_) = plan(*BASE, LADDER, "export.model.overwrite=True").jobs(folder_of)
    assert (kept.settings.overwrite, kept.settings.reuse) == (True, False)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("evaluate.ladder=[fp32,fp4]",), "unknown rung; got 'fp4'; choices: fp32, bf16"),
        (("evaluate.ladder=[fp32,fp32]",), "named twice"),
        (("evaluate.ladder=fp32",), "a ladder is a list of rungs"),
        (("evaluate.ladder=[]",), "a ladder is a list of rungs"),
        (
            (LADDER, "export.triton_deployment.data_type=fp32"),
            "computes in the configured half type; got 'fp32'; choices: fp16, bf16",
        ),
        ((LADDER, "stages=[export,evaluate]"), "serves and evaluates every rung"),
        ((LADDER, "evaluate.stop_server=False"), "one after the other"),
        ((LADDER, "evaluate.run.results_dir=/r"), "the same folder.*evaluate.run.results_dir"),
        (
            (LADDER, "export.triton_deployment.triton_model_dir=/r/gpt3_126m"),
            "the same folder.*triton_model_dir",
        ),
    ],
)
def test_what_cannot_work_is_refused(plan: Planner, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(*BASE, *overrides)


def test_nothing_is_submitted_where_one_rung_is_wrong(
    run: Run, arguments: list[str], calls: Path, tmp_path: Path
) -> None:
    earlier = tmp_path / "the results/tiny/evaluate_tp2_pp1_bf16_bf16"
    data = f"evaluate.tasks.lambada.data_file='{earlier}/${{export.model.weight_data_type}}'"
    earlier.mkdir(parents=True)
    for name in ("fp32", "fp16"):
        (earlier / name).touch()
    result = run(STAGES, LADDER, *arguments, data)
    assert result.returncode != 0
    assert f"data_file of the task lambada is not there; got '{earlier}/bf16'" in result.stderr
    assert "1 problem" in result.stderr
    assert not calls.exists()


def test_slurm_is_told_the_order(run: Run, arguments: list[str], calls: Path) -> None:
    result = run(STAGES, LADDER, *arguments)
    assert result.returncode == 0, result.stderr
    words = [line.split() for line in calls.read_text().splitlines()]
    conditions = [each[0].removeprefix("--dependency=") for each in words[1:]]
    assert conditions == [
        *("afterok:101", "after:102,afterok:101"),
        *("afterany:101:102:103", "afterok:104", "after:105,afterok:104"),
        *("afterany:104:105:106", "afterok:107", "after:108,afterok:107"),
        "afterany:107:108:109",
    ]


def test_a_service_that_begins_a_rung_waits_for_no_success(
    run: Run, arguments: list[str], calls: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repo" / "tiny"
    (repository / "1" / "2-gpu").mkdir(parents=True)
    text = 'backend: "fastertransformer" parameters { key: "tensor_para_size" '
    (repository / "config.pbtxt").write_text(text + 'value { string_value: "2" } }')
    links = tmp_path / "${export.run.config_summary}"
    for name in SUMMARIES[:2]:
        (tmp_path / f"tp2_pp1_{name}").symlink_to(repository.parent)
    given = f"deploy.model_repository='{links}'"
    ladder = "evaluate.ladder=[fp32,bf16]"
    result = run("stages=[deploy,evaluate]", ladder, given, *arguments)
    assert result.returncode == 0, result.stderr
    conditions = [line.split()[0] for line in calls.read_text().splitlines()]
    assert conditions[1:] == [
        f"--dependency={condition}"
        for condition in ("after:101", "afterany:101:102", "after:103", "afterany:103:104")
    ]


def test_here_the_rungs_run_one_after_the_other_and_a_failed_one_stops_no_other(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    failing = {"EXPORT_FAILS_FOR": "bf16", "EXPORT_EXITS": "23"}
    half = "export.triton_deployment.data_type=fp16"
    result = run(STAGES, LOCAL, LADDER, half, *arguments, **failing)
    assert result.returncode == 0, result.stderr
    said = result.stdout
    assert "compares fp32 export deploy evaluate\ncompares bf16 export\n" in said
    assert "compares int8 export deploy evaluate\n" in said
    assert "the export job export_tiny_bf16 failed with exit code 23" in said
    assert "the ladder goes on with its next rung" in said
    results = tmp_path / "the results" / "tiny"
    for summary in (SUMMARIES[0], "fp16_fp16_int8"):
        deploy = results / f"deploy_tp2_pp1_{summary}"
        assert_ended((deploy / "pids").read_text())
        log = next((deploy / "jobs" / "001").glob("log-*.out")).read_text()
        assert "server stopped in order" in log
    assert said.index("measuring at") < said.index("export: export_tiny_bf16")
    record = json.loads((results / "ladder/jobs/001/job.json").read_text())
    assert record["stage"] == "ladder"
    settings = yaml.safe_load((results / "ladder/jobs/001/ladder_tiny_hydra.yaml").read_text())
    assert settings["rungs"][0]["report_dir"] == str(results / "evaluate_tp2_pp1_fp32_fp32")


def test_a_failing_evaluation_leaves_no_server_beside_the_next_rung(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    result = run(STAGES, LOCAL, "evaluate.ladder=[fp32,bf16]", *arguments, EVALUATE_EXITS="1")
    assert result.returncode == 0, result.stderr
    deploys = [tmp_path / f"the results/tiny/deploy_tp2_pp1_{name}" for name in SUMMARIES[:2]]
    logs = [next((each / "jobs/001").glob("log-*.out")) for each in deploys]
    assert all("server stopped in order" in log.read_text() for log in logs)
    assert logs[0].stat().st_mtime_ns < (deploys[1] / "pids").stat().st_mtime_ns
    assert "compares bf16 export deploy evaluate" in result.stdout
