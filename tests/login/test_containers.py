"""Images as pyxis and enroot name them, and the variables that a container would not take over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher_scripts.cluster.containers import is_file, registry_name
from launcher_scripts.cluster.enroot import EnrootImage
from launcher_scripts.cluster.variables import Variables
from stages.plan import make_plan
from tests.login.conftest import Compose
from tests.login.test_golden import BASE
from tests.login.test_golden_jobs import ENROOT, IMAGE, folder_of


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
def test_a_path_of_the_job_is_not_the_script_s(
    hydra_config: Compose, runtime: tuple[str, ...]
) -> None:
    given = "+env_vars={PATH: '/opt/bin:/bin', QUOTED: '\"a\"', PLAIN: x}"
    plan = make_plan(hydra_config(*BASE, *runtime, IMAGE, given, "stages=[export]"))
    (job,) = plan.jobs(folder_of)
    script = plan.cluster.render(job)
    assert "export PLAIN=x\n" in script
    assert "export PATH" not in script
    assert "    env PATH=/opt/bin:/bin \\\n    'QUOTED=\"a\"' \\\n    python3 -m " in script
    for names in ("--container-env=", " LOCAL_RANK PYTHONPATH "):
        for line in script.splitlines():
            assert names not in line or ("PLAIN" in line and " PATH" not in line)


ENROOT_PROGRAM = """#!/bin/bash
cd "${0%/*}"
case $1 in
    create) mkdir "$3" ;;
    remove) rmdir "$3" ;;
    start) echo "$@" > started ;;
esac
"""


@pytest.mark.parametrize(("restarts", "code"), [("0", 1), ("1", 0)])
def test_a_job_that_starts_again_replaces_what_was_cut_off(
    data_dir: Path, tmp_path: Path, restarts: str, code: int
) -> None:
    """The container's name is that of the job, which has the same number then."""
    script = (data_dir.parent / "golden" / "bcm_enroot" / "export.sh").read_text()
    function = script[script.index("in_container() {") : script.index("export -f in_container")]
    for name, text in (("enroot", ENROOT_PROGRAM), ("scontrol", "#!/bin/sh\necho n1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "launcher_7_0_0").mkdir()
    numbers = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NTASKS": "1"}
    env = {f"SLURM_{name}": value for name, value in numbers.items()}
    env |= {"SLURM_STEP_NODELIST": "n1", "SLURM_RESTART_COUNT": restarts}
    env |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "/x"}
    env |= {"AWS_SECRET_ACCESS_KEY": "secret", "CUDA_HOME": "/host/cuda"}
    ran = subprocess.run(
        ["bash", "-c", f"{function}\nin_container true"], env=env, capture_output=True, text=True
    )
    assert ran.returncode == code, ran.stderr
    assert not (tmp_path / "launcher_7_0_0").exists()
    if code == 0:
        started = (tmp_path / "started").read_text()
        assert "--env AWS_SECRET_ACCESS_KEY " in started
        assert "CUDA_HOME" not in started
        assert "secret" not in started


@pytest.mark.parametrize("cluster", [(), (ENROOT,), ("cluster_type=bcp",)], ids=str)
def test_packages_that_the_image_lacks(
    hydra_config: Compose, tmp_path: Path, cluster: tuple[str, ...]
) -> None:
    """They come behind the launcher and before what the user names, in every job and container."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "overlay.json").write_text("{}")
    given = (f"cluster.overlay={tmp_path}/packages", "+env_vars.PYTHONPATH=/own")
    plan = make_plan(hydra_config(*BASE, IMAGE, *cluster, *given))
    assert "cluster.overlay" not in "".join(plan.absent)
    for job in plan.jobs(folder_of):
        launcher, *others = job.env["PYTHONPATH"].split(":")
        assert others == [f"{tmp_path}/packages", "/own"]
        if job.container is not None:
            folders = [Path(mount.split(":")[1]) for mount in job.container.mounts]
            assert any((tmp_path / "packages").is_relative_to(folder) for folder in folders)
        assert f"{launcher}:{tmp_path}/packages:/own" in plan.cluster.render(job)


def test_a_folder_without_packages_is_found_at_login(hydra_config: Compose) -> None:
    plan = make_plan(hydra_config(*BASE, IMAGE, "cluster.overlay=/nowhere/packages"))
    said = "".join(plan.absent)
    assert "'/nowhere/packages/overlay.json'; change cluster.overlay" in said
