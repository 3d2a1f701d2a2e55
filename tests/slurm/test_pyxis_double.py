"""The SPANK test double takes pyxis's options, records them, and fails where pyxis fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.slurm.cluster import TestCluster
from tests.slurm.configuration import write_plugstack


def test_every_option_is_recorded_in_both_spellings(slurm: TestCluster, image: Path) -> None:
    before = len(slurm.pyxis_record())
    ran = slurm.run(
        "srun",
        "--nodes=2",
        f"--container-image={image}",
        "--container-mounts",
        f"/tmp,{image.parent}:{image.parent}:ro",
        "--container-workdir=/tmp",
        "--container-name",
        "some:create",
        "--container-env=A,B",
        "--container-save=/tmp/saved.sqsh",
        "--no-container-mount-home",
        "--container-remap-root",
        "--no-container-entrypoint",
        "--container-readonly",
        "pwd",
    )
    assert (ran.returncode, ran.stdout.splitlines()) == (0, ["/tmp", "/tmp"]), ran.stderr
    client, *tasks = slurm.pyxis_record()[before:]
    assert client["phase"] == "srun"
    assert [task["phase"] for task in tasks] == ["task", "task"]
    assert sorted((task["node"], task["rank"]) for task in tasks) == [(0, 0), (1, 1)]
    options = {
        "image": str(image),
        "mounts": f"/tmp,{image.parent}:{image.parent}:ro",
        "workdir": "/tmp",
        "name": "some:create",
        "env": "A,B",
        "save": "/tmp/saved.sqsh",
        "mount_home": "no",
        "remap_root": "yes",
        "entrypoint": "no",
        "entrypoint_log": None,
        "writable": "no",
    }
    for entry in (client, *tasks):
        assert options.items() <= entry.items()


def test_awkward_values_arrive_as_they_are(slurm: TestCluster, tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" $(touch x) \\ c\td'
    folder.mkdir()
    image = folder / "image.sqsh"
    image.write_bytes(b"hsqs")
    workdir = tmp_path / "a 'b' ; # %j"
    workdir.mkdir()
    ran = slurm.run(
        "srun",
        f"--container-image={image}",
        f"--container-mounts={workdir}",
        f"--container-workdir={workdir}",
        "pwd",
    )
    assert ran.stdout.rstrip("\n") == str(workdir), ran.stderr
    assert slurm.pyxis_record()[-1]["image"] == str(image)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--container-image={folder}/absent.sqsh"],
            "    [ERROR] No such file or directory: {folder}/absent.sqsh",
        ),
        (["--container-image=image.sqsh"], "failed to import docker image: image.sqsh"),
        (["--container-image={folder}"], "    [ERROR] Invalid image format: {folder}"),
        (
            ["--container-name=some"],
            'error: a container with name "pyxis_some" does not exist, and --container-image',
        ),
        (
            ["--container-image={image}", "--container-mounts={folder}/absent:/data"],
            "--container-mounts: source path does not exist: {folder}/absent",
        ),
        (
            [
                "--container-image={image}",
                "--container-mounts={folder}",
                "--container-workdir={folder}/absent",
            ],
            "couldn't chdir to {folder}/absent: No such file",
        ),
        (
            ["--container-image={image}", "--container-workdir={folder}"],
            "couldn't chdir to {folder}: No such file or directory",
        ),
        (
            ["--container-image={image}", "--container-mounts=/tmp:/$(touch x)"],
            "a shell would not leave mounts as they are",
        ),
    ],
)
def test_a_step_fails_on_what_is_missing(
    slurm: TestCluster, image: Path, options: list[str], message: str
) -> None:
    names = {"folder": str(image.parent), "image": str(image)}
    argv = [option.format(**names) for option in options]
    ran = slurm.run("srun", *argv, "echo", "it ran", cwd=image.parent)
    assert ran.returncode == 1
    assert "pyxis: " + message.format(**names) in ran.stderr
    assert "it ran" not in ran.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--container-image="],
        ["--container-image=/a", "--container-image=/b"],
        ["--container-mounts=:/x"],
        ["--container-mounts=data:/data"],
        ["--container-mounts=/data:/data:ro,noexec"],
        ["--container-writable", "--container-readonly"],
    ],
)
def test_contradictions_never_leave_the_client(slurm: TestCluster, options: list[str]) -> None:
    ran = slurm.run("srun", *options, "true")
    assert ran.returncode != 0
    assert "pyxis: " in ran.stderr


def test_what_pyxis_does_not_check_is_accepted(slurm: TestCluster, image: Path) -> None:
    ran = slurm.run(
        "srun",
        f"--container-image={image}",
        "--container-mounts=/tmp:/tmp:z+of+mount",
        "--container-env=A B",
        "true",
    )
    assert ran.returncode == 0, ran.stderr


def test_the_image_s_variables_win_except_for_the_named_ones(
    slurm: TestCluster, image: Path
) -> None:
    Path(f"{image}.env").write_text("MINE=image\nYOURS=image\nLD_PRELOAD=\n")
    given = {"MINE": "'job'\nX=1", "YOURS": "job", "OTHER": "job", "LD_LIBRARY_PATH": "/job"}
    environment = {**slurm.environment, **given}
    ran = slurm.run(
        "srun",
        f"--container-image={image}",
        "--container-env=MINE,LD_LIBRARY_PATH",
        "bash",
        "-c",
        'echo "$MINE $YOURS $OTHER $LD_LIBRARY_PATH"',
        env=environment,
    )
    assert ran.stdout.strip() == "job image job", ran.stderr


def test_a_second_step_joins_the_named_container_of_its_job_and_node(
    slurm: TestCluster, image: Path
) -> None:
    name = "--container-name=multi"
    steps = (
        f"srun -N1 --nodelist=n2 --container-image={image} {name} true || exit 3\n"
        f"srun -N1 --nodelist=n2 --overlap {name} hostname > /dev/null || exit 4\n"
        f"srun -N1 --nodelist=n1 {name} true && exit 5\n"
        "exit 0\n"
    )
    ran = slurm.run("salloc", "--nodes=2", "bash", "-c", steps)
    assert ran.returncode == 0, ran.stderr
    assert '"pyxis_multi" does not exist' in ran.stderr
    assert slurm.containers() == ["n2/pyxis_multi"]


@pytest.mark.parametrize(
    ("scope", "there", "stays"),
    [
        ("global", ["pyxis_{0}.1", "pyxis_some"], ["n1/pyxis_some"]),
        ("job", ["pyxis_{0}_{0}.1", "pyxis_{0}_some"], []),
    ],
)
def test_a_named_container_goes_with_its_job_at_most_and_another_with_its_step(
    slurm: TestCluster, image: Path, scope: str, there: list[str], stays: list[str]
) -> None:
    write_plugstack(slurm.paths, scope)
    given = f"--container-image={image}"
    steps = (
        f"srun {given} --container-name=some true || exit 3\n"
        f"srun {given} bash -c 'echo $SLURM_JOB_ID; ls {slurm.paths.containers}/n1'\n"
    )
    ran = slurm.run("salloc", "--nodelist=n1", "bash", "-c", steps)
    assert ran.returncode == 0, ran.stderr
    job_id, *seen = ran.stdout.split()
    assert seen == [name.format(job_id) for name in there]
    wait_for(lambda: slurm.containers() == stays)
