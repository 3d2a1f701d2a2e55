"""Export, deploy and evaluate a trained model by one command line: python3 main.py --help."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


def leave(number: int, _frame: object) -> NoReturn:
    """End now: nothing has been started yet, and Python drops an exception in a finalizer."""
    os.write(2, f"error: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":  # before the imports, which take a second
    if None in (sys.stdin, sys.stdout, sys.stderr):
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from launcher_scripts.common.command_line import open_missing_streams

        open_missing_streams()
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from launcher_scripts.common.command_line import help_text

        with contextlib.suppress(BrokenPipeError):
            print(help_text(Path(__file__).resolve().parent / "conf", sys.argv[1:]), flush=True)
        os._exit(0)
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asked) is not signal.SIG_IGN:  # nohup's wish stays
            signal.signal(asked, leave)

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from launcher_scripts.common.errors import ConfigError, LauncherError, VerdictError
    from launcher_scripts.common.hosts import submit
    from launcher_scripts.common.packages import ERROR, VERDICTS
    from stages.choices import (
        check_choices,
        check_grammar,
        check_keys,
        fill_in,
        normalized_arguments,
        register_file_source,
        with_stage_options,
        with_texts_of_variables,
    )
    from stages.deploy import register_deployed_gateway
    from stages.plan import DeploymentPlan, configurations, make_plan
except ModuleNotFoundError as missing:
    print(
        f"error: {sys.executable} has no package {missing.name}: `make setup` installs all of them "
        "into .venv, `. .venv/bin/activate` makes that the python3 that is run",
        file=sys.stderr,
    )
    sys.exit(3)  # packages.ERROR, which may be what is missing

CHECKOUT = Path(__file__).resolve().parent
TERMINAL = sys.stderr


def register() -> None:
    """The two functions that the configuration files may call, and what they take from stages."""
    OmegaConf.register_new_resolver("checkout", lambda path: str(CHECKOUT / path), replace=True)
    OmegaConf.register_new_resolver(
        "parent_folder", lambda path: str(Path(path).parent), replace=True
    )
    register_deployed_gateway()
    register_file_source()


def read(config: DictConfig, overrides: Sequence[str] = ()) -> DeploymentPlan:
    """Everything that will be done, checked.

    overrides: the `key=value` of the command line
    """
    fill_in(config)
    try:
        values: list[Any] = [
            OmegaConf.to_container(each, resolve=True, throw_on_missing=True)
            for each in configurations(config)
        ]
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be resolved: {error}") from error
    return make_plan(*values, overrides=overrides)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Plan every stage with all of its checks, then submit the jobs in order."""
    sys.stderr = TERMINAL
    try:
        if config.cluster.get("ssh") is not None:
            raise Ended(submit(config.cluster.ssh, config.cluster.ssh_python, sys.argv[1:]))
        plan = read(config, HydraConfig.get().overrides.task)
        if plan.dry_run:
            print(plan.preview())
            print(plan.ask_scheduler())
        else:
            plan.submit()
        sys.stdout.flush()
    except LauncherError as error:
        refused(error)
    except BrokenPipeError:
        # The reader has seen enough; Python would complain about the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Ended(128 + signal.SIGPIPE) from None


class Ended(SystemExit):
    """An end with an exit code that the launcher has chosen."""


def refused(error: LauncherError) -> NoReturn:
    """End with the code of a verdict or of a failed job, or else with one that is not a verdict."""
    if isinstance(error, VerdictError):
        print(error, file=sys.stderr)
        raise Ended(error.exit_code)
    print(f"error: {error}", file=sys.stderr)
    raise Ended(ERROR if error.exit_code in VERDICTS else error.exit_code)


def explain(arguments: list[str], answer: str) -> None:
    """Print what is wrong with a command line that Hydra has refused.

    answer: what Hydra printed, which is used if the keys themselves are right
    """
    try:
        check_keys(arguments, CHECKOUT / "conf")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    unknown = answer.rpartition("unrecognized arguments: ")[2].strip()
    if unknown == answer.strip():
        print(answer, end="", file=sys.stderr)
    else:
        keys = "settings are written KEY=VALUE; --help lists the keys"
        print(f"error: unknown option; got {unknown}; {keys}", file=sys.stderr)


if __name__ == "__main__":
    register()
    try:
        sys.argv[1:] = with_stage_options(normalized_arguments(sys.argv[1:]))
        check_grammar(sys.argv[1:])
        sys.argv[1:] = with_texts_of_variables(sys.argv[1:])
        check_choices(sys.argv[1:], CHECKOUT / "conf")
    except LauncherError as error:
        refused(error)
    sys.stderr = io.StringIO()  # until Hydra has composed the configuration
    try:
        main()
    except SystemExit as ended:
        answer, sys.stderr = sys.stderr, TERMINAL
        if ended.code and isinstance(answer, io.StringIO):
            explain(sys.argv[1:], answer.getvalue())
        # Hydra's own errors are 1 and 2, which are verdicts here.
        failed = ended.code in VERDICTS and ended.code and not isinstance(ended, Ended)
        sys.exit(ERROR if failed else ended.code)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
