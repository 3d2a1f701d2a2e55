"""The script of a Slurm job: templates/slurm.sh.j2 with the parts that its job needs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.cluster.containers import EnrootImage, check_mounts, enroot_mount
from launcher_scripts.cluster.job import Job, Step
from launcher_scripts.cluster.slurm_options import SlurmOptions, file_pattern
from launcher_scripts.cluster.state import RUNNING, WAITING
from launcher_scripts.common.exit_codes import ERROR, VERDICT_FILE, VERDICTS
from launcher_scripts.common.rendering import render

# They would change how the script finds Slurm's programs, and neither enroot nor pyxis takes
# them over from a job.
_OF_THE_NODE = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
# enroot keeps variables as lines of a file, and takes quotes around a value off.
_NO_LINE = re.compile(r"|.*\n.*|[\"'].*[\"']\s*", re.DOTALL)


@dataclass(frozen=True)
class Variables:
    """exported: for all of a script; given: in front of a step's command, as arguments of env."""

    exported: Mapping[str, str]
    given: Mapping[str, str]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Variables:
        given = {
            name: value
            for name, value in env.items()
            if name in _OF_THE_NODE or _NO_LINE.fullmatch(value)
        }
        return cls({name: env[name] for name in env if name not in given}, given)


# Seconds between two queries of a client's job about its server's, and of a server's about its
# client's.
_CHECK_SECONDS = 5
_WATCH_SECONDS = 20
_LIVING = "|".join(sorted(RUNNING | WAITING))


def slurm_script(job: Job, options: SlurmOptions, sbatch: Mapping[str, Any]) -> str:
    """The text that sbatch is given; `sbatch` are the options in its head, by their long names."""
    env = {**(job.client.env if job.client is not None else {}), **job.env}
    exported = Variables.of(env).exported
    check_mounts(job, options.container_runtime)
    return render(
        "slurm.sh.j2",
        job=job,
        env=exported,
        variables_of=Variables.of,
        sbatch=dict(sorted(sbatch.items())),
        options=options,
        starts=_starts,
        server_log=file_pattern(job.folder.server_log_stem),
        error_code=ERROR,
        living=_LIVING,
        watch_seconds=_WATCH_SECONDS,
        enroot=_enroot(job, options, exported),
        beside=_beside(job),
    )


def _starts(job: Job) -> list[tuple[Step, ...]]:
    """The steps as srun starts them: in a container together, so that it is unpacked once.

    pyxis removes a container without a name with its step, however that ends.
    """
    return [job.steps] if job.container is not None else [(step,) for step in job.steps]


def _enroot(job: Job, options: SlurmOptions, env: Mapping[str, str]) -> str:
    """The functions of the script that run a step in a container without pyxis."""
    container = job.container
    if container is None or options.container_runtime != "enroot":
        return ""
    mounts = container.mounts
    if job.client is not None and job.client.container is not None:
        mounts = tuple(dict.fromkeys([*mounts, *job.client.container.mounts]))
    return render(
        "enroot.sh.j2",
        image=EnrootImage.find(container.image, options.image_cache),
        mounts=[enroot_mount(mount) for mount in mounts],
        env=tuple(env),
    )


def _beside(job: Job) -> str:
    """The functions of the script that run a client as long as its server runs."""
    server = job if job.client is not None else job.server
    if server is None or server.service is None:
        return ""
    return render(
        "beside_server.sh.j2",
        error_code=ERROR,
        verdicts=VERDICTS,
        verdict_file=(job.client or job).folder.results_dir / VERDICT_FILE,
        living=_LIVING,
        job=job,
        server_log_stem=job.folder.server_log_stem,
        check_seconds=1 if job.client is not None else _CHECK_SECONDS,
        stop_seconds=math.ceil(server.service.stop_timeout),
    )
