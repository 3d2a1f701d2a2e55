"""The variables of this process's environment: those that describe a job in which it runs, and
those with which a user sets defaults of sbatch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Slurm's, MPI's and torchrun's descriptions of one job, step and task.
_OF_A_JOB = re.compile(
    r"SLURM_(JOB|STEP(?!_KILLED)|ARRAY|HET|PACK|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|RESTART|SRUN|"
    r"LAUNCH|NODE_ALIASES|TOPOLOGY|PRIO_PROCESS|CPUS_ON|GPUS_ON|SHARDS_ON|CLUSTER_NAME|SUBMIT).*"
    r"|SLURMD_.*|SRUN_.*|SPANK_.*|SLURM_SPANK_.*|_SLURM.*|SLURM_(CPU|MEM)_BIND.*|SBATCH_CPU_BIND.*"
    r"|(OMPI|PMIX|PMI|PRTE|TORCHELASTIC)_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
)
# Input of srun or sbatch outside of a job; inside, Slurm sets them.
_OF_A_JOB_INSIDE = re.compile(
    r"SLURM_(CONTAINER|CPU|DIST|EXACT|EXCLUSIVE|EXPORT_ENV|GPU|GRES|MEM|MPI_TYPE|NNODES|NODELIST|"
    r"NPROCS|NTASKS|OVERCOMMIT|OVERLAP|PROFILE|TASKS_PER|THREADS|TRES|UMASK|WORKING|OOM).*"
    r"|SBATCH_(CPU|MEM)_BIND.*"
)
_JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID")
_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")

# Options of sbatch whose variables have other names, and options that exclude each other.
_OPTIONS = {
    "ARRAY_INX": "array",
    "DEBUG": "verbose",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
}
_FAMILIES = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"requeue", "no-requeue"},
    {"gpus", "gpus-per-node", "gpus-per-task"},
    {"output", "error"},
)
# The launcher decides these for every job, also where it leaves the option out.
_OWN = frozenset({"array", "wait", "input", "nodes", "ntasks", "parsable", "test-only", "wrap"})


def without_job(env: Mapping[str, str], *, gpus: bool = True) -> dict[str, str]:
    """The environment without the variables of a job in which this process runs.

    gpus: whether the choice of GPUs stays
    """
    inside = any(name in env for name in _JOB_IDS)
    return {
        name: value
        for name, value in env.items()
        if not _OF_A_JOB.fullmatch(name)
        and not (inside and _OF_A_JOB_INSIDE.fullmatch(name))
        and (gpus or name not in _GPUS)
    }


@dataclass(frozen=True)
class SubmissionEnvironment:
    """The environment of sbatch.

    defaults: variables that set options of sbatch, by the option
    unused:   those that were removed, because the job's script sets the option: sbatch would
              prefer the variable
    """

    variables: Mapping[str, str]
    defaults: Mapping[str, str]
    unused: Mapping[str, str]

    @classmethod
    def of(cls, env: Mapping[str, str], flags: Collection[str]) -> SubmissionEnvironment:
        """flags: the options in the head of the job's script, by their long names"""
        variables = without_job(env, gpus=False)
        options = {name: _option(name) for name in variables if name.startswith("SBATCH_")}
        options |= {"SLURM_CLUSTERS": "clusters"} if "SLURM_CLUSTERS" in variables else {}
        owned = {*flags, *_OWN}.union(*(family for family in _FAMILIES if family & {*flags}))
        unused = {name: option for name, option in options.items() if option in owned}
        return cls(
            {name: value for name, value in variables.items() if name not in unused},
            {option: name for name, option in options.items() if name not in unused},
            {option: name for name, option in unused.items()},
        )

    def notes(self) -> list[str]:
        """A line for each variable that sets an option of sbatch, or does not."""
        used = [
            f"{name}={self.variables[name]}: a default of this shell, sbatch --{option}"
            for option, name in self.defaults.items()
        ]
        return used + [
            f"{name} is not used: the job sets --{option} (a null cluster.* key leaves it out)"
            for option, name in self.unused.items()
        ]


def _option(name: str) -> str:
    word = name.removeprefix("SBATCH_")
    return _OPTIONS.get(word, word.lower().replace("_", "-"))
