"""Images as pyxis and enroot name them, and the variables that a container would not take over."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher_scripts.cluster.slurm_script import (
    EnrootImage,
    Variables,
    image_problem,
    is_file,
    registry_name,
)
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.packages import LATER_STEPS
from tests.login.conftest import Planner
from tests.login.test_golden import BASE, ENROOT, IMAGE, folder_of


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("ubuntu", "ubuntu"),
        ("ubuntu:22.04", "ubuntu:22.04"),
        ("nvidia/cuda:12.2.0-base", "nvidia/cuda:12.2.0-base"),
        ("nvcr.io#nvidia/nemo:23", "nvcr.io#nvidia/nemo:23"),
        ("nvcr.io/nvidia/nemo:23", "nvcr.io#nvidia/nemo:23"),
        ("docker://nvcr.io#nvidia/nemo:23", "nvcr.io#nvidia/nemo:23"),
        ("docker://nvcr.io/nvidia/nemo:23", "nvcr.io#nvidia/nemo:23"),
        ("$oauthtoken@nvcr.io/nvidia/nemo", "$oauthtoken@nvcr.io#nvidia/nemo"),
        ("localhost:5000/nemo", "localhost:5000#nemo"),
        ("docker.io/library/ubuntu", "library/ubuntu"),
        ("dockerd://nemo:23", "dockerd://nemo:23"),
    ],
)
def test_an_image_is_named_as_pyxis_does(image: str, name: str) -> None:
    assert registry_name(image) == name
    assert not is_file(image)


@pytest.mark.parametrize(
    "image",
    [
        "nvcr.io/NVIDIA/nemo:23",
        "Ubuntu",
        "nvcr.io#nvidia/nemo:2 3",
        "oci://nemo",
        "",
    ],
)
def test_a_name_that_no_registry_has_is_refused(plan: Planner, image: str) -> None:
    with pytest.raises(
        ConfigError, match=r"not a name of an image.*lower case; got .*; change contai"
    ):
        plan(*BASE, f"container='{image}'")


@pytest.mark.parametrize(
    "image", ["nemo:23.08-Py3", "$oauthtoken@nvcr.io/nvidia/nemo", "nemo@sha256:0aF", "podman://A"]
)
def test_a_name_that_enroot_reads_is_taken(image: str) -> None:
    assert image_problem(registry_name(image)) is None


def test_an_image_s_file_is_looked_at(plan: Planner, tmp_path: Path) -> None:
    """One that is not there is a note of a dry run, whatever its name ends in."""
    absent = plan(*BASE, "container=/no/such/image").absent
    assert any("the container image is not there; got '/no/such/image'" in note for note in absent)
    (tmp_path / "text.sqsh").write_text("no squashfs")
    (tmp_path / "good").write_bytes(b"hsqs")
    for path in (tmp_path, tmp_path / "text.sqsh"):
        with pytest.raises(ConfigError, match="is not a squashfs file"):
            plan(*BASE, f"container={path}")
    made = plan(*BASE, f"container={tmp_path / 'good'}")
    assert not any("container image" in note for note in made.absent)


def test_paths_are_no_names() -> None:
    for image in ("/images/a", "./a", "~/a", "a.sqsh", "images/a.squashfs"):
        assert is_file(image)


@pytest.mark.parametrize(
    ("image", "uri", "file"),
    [
        (
            "nvcr.io/nvidia/nemo:23",
            "docker://nvcr.io#nvidia/nemo:23",
            "nvcr.io+nvidia+nemo+23.sqsh",
        ),
        ("dockerd://nemo", "dockerd://nemo", "dockerd+++nemo.sqsh"),
    ],
)
def test_enroot_fetches_it_by_its_uri(image: str, uri: str, file: str) -> None:
    found = EnrootImage.find(image, "/cache")
    assert (found.uri, found.file.name) == (uri, file)


def test_variables_that_no_container_takes_over_are_given_to_the_command() -> None:
    env = {
        "PATH": "/opt/bin:/usr/bin",
        "LD_LIBRARY_PATH": "/opt/lib",
        "LINES": "a\nb",
        "QUOTED": '"a b"',
        "EMPTY": "",
        "PLAIN": 'a "b" c',
    }
    variables = Variables.of(env)
    assert variables.exported == {"PLAIN": 'a "b" c'}
    assert variables.given == {name: env[name] for name in env if name != "PLAIN"}


@pytest.mark.parametrize("runtime", [(), (ENROOT,)], ids=["pyxis", "enroot"])
def test_a_path_of_the_job_is_not_the_script_s(plan: Planner, runtime: tuple[str, ...]) -> None:
    given = "+env_vars={PATH: '/opt/bin:/bin', QUOTED: '\"a\"', PLAIN: x}"
    made = plan(*BASE, *runtime, IMAGE, given, "stages=[export]")
    (job,) = made.jobs(folder_of)
    script = made.cluster.render(job)
    outside, inside = script.split("    sh -c ")
    assert "export PLAIN=x\n" in outside
    assert "export PATH" not in outside
    (inside,) = shlex.split(inside)
    assert "\nexport PATH=/opt/bin:/bin\nexport QUOTED='\"a\"'\n" in inside
    for names in ("--container-env=", " LOCAL_RANK PYTHONPATH "):
        for line in script.splitlines():
            assert names not in line or ("PLAIN" in line and " PATH" not in line)


def test_a_job_that_starts_again_replaces_what_was_cut_off(data_dir: Path, tmp_path: Path) -> None:
    """The container's name is that of the job, which has the same number then."""
    tests = data_dir.parent
    script = (tests / "golden" / "bcm_enroot" / "export.sh").read_text()
    functions = script[script.index("remove_leftovers() {") : script.index("export -f in_contain")]
    double = (tests / "slurm" / "enroot_double.sh").read_text()
    programs = {"enroot": double, "scontrol": "#!/bin/sh\necho n1\n", "squeue": "#!/bin/sh\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    image = tmp_path / "inference.sqsh"
    image.write_bytes(b"hsqs")
    functions = functions.replace("/images/inference.sqsh", str(image))
    functions = re.sub(r" +--mount .*\\\n", "", functions)
    (tmp_path / "calls.nodes" / "n1" / "launcher_test_7_0_0").mkdir(parents=True)
    numbers = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NTASKS": "1"}
    env = {f"SLURM_{name}": value for name, value in numbers.items()}
    env |= {"SLURM_STEP_NODELIST": "n1", "SLURM_CLUSTER_NAME": "test", "SLURMD_NODENAME": "n1"}
    env |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "/x"}
    env |= {"AWS_SECRET_ACCESS_KEY": "secret", "CUDA_HOME": "/host/cuda"}
    env |= {"ENROOT_CALLS": str(tmp_path / "calls"), "ENROOT_SECONDS": "0"}
    ran = subprocess.run(
        ["bash", "-c", f"{functions}\nin_container true"], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "calls.nodes" / "n1").iterdir()) == []
    calls = (tmp_path / "calls").read_text()
    assert "--env AWS_SECRET_ACCESS_KEY " in calls
    assert "CUDA_HOME" not in calls
    assert "secret" not in calls


@pytest.mark.parametrize("cluster", [(), (ENROOT,), ("cluster_type=bcp",)], ids=str)
def test_packages_that_the_image_lacks(
    plan: Planner, tmp_path: Path, cluster: tuple[str, ...]
) -> None:
    """They come behind the launcher and before what the user names, in every job and container."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "overlay.json").write_text("{}")
    given = (f"cluster.overlay={tmp_path}/packages", "+env_vars.PYTHONPATH=/own")
    made = plan(*BASE, IMAGE, *cluster, *given)
    assert "cluster.overlay" not in "".join(made.absent)
    for job in made.jobs(folder_of):
        launcher, *others = job.env["PYTHONPATH"].split(":")
        assert others == [f"{tmp_path}/packages", "/own"]
        if job.container is not None:
            folders = [Path(mount.split(":")[1]) for mount in job.container.mounts]
            assert any((tmp_path / "packages").is_relative_to(folder) for folder in folders)
        assert f"{launcher}:{tmp_path}/packages:/own" in made.cluster.render(job)


def test_a_folder_without_packages_is_found_at_login(plan: Planner) -> None:
    made = plan(*BASE, IMAGE, "cluster.overlay=/nowhere/packages")
    said = "".join(made.absent)
    assert "'/nowhere/packages/overlay.json'; change cluster.overlay" in said


@pytest.mark.parametrize("runtime", ["pyxis", "enroot"])
def test_the_first_job_looks_for_the_packages_of_later_steps_of_its_image(
    plan: Planner, runtime: str
) -> None:
    """Nobody can look into an image from the login node."""
    stages = "stages=[export,deploy,evaluate]"

    def later(*more: str) -> list[list[str]]:
        made = plan(*BASE, IMAGE, f"cluster.container_runtime={runtime}", *more)
        return [
            job.env.get(LATER_STEPS, "").split(",") if LATER_STEPS in job.env else []
            for job in made.jobs(folder_of)
        ]

    steps = ["judge", "measure_accuracy", "measure_speed", "start_server"]
    assert later(stages) == [steps, [], []]
    assert later(stages, "++deploy.cluster.python=/opt/other") == [steps[:3], [], []]
    assert later("stages=[export]") == [[]]
    assert later(stages, "cluster.container_runtime=none") == [[], [], []]
