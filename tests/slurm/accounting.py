"""Accounting for a test cluster: slurmdbd and a MariaDB of its own."""

from __future__ import annotations

import getpass
import os
import secrets
import subprocess
from pathlib import Path

from tests.slurm.configuration import Paths, free_ports

ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "setsid", "sacct")


def write_accounting(paths: Paths) -> None:
    """Write the configuration of both daemons, and point slurm.conf at them."""
    database_port, slurmdbd_port = free_ports(2)
    password = secrets.token_hex(16)
    etc, run = paths.slurm_conf.parent, paths.root / "run"
    _write_secret(
        etc / "mariadb.sql",
        f"CREATE OR REPLACE USER slurm@localhost IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;\n",
    )
    (etc / "mariadb.cnf").write_text(
        f"""\
[mariadbd]
user={getpass.getuser()}
datadir={paths.root}/database
socket={run}/mariadb.socket
pid-file={paths.pid_file("mariadbd")}
log-error={paths.log("mariadbd")}
bind-address=127.0.0.1
port={database_port}
init-file={etc}/mariadb.sql
innodb-buffer-pool-size=32M
""",
        encoding="utf-8",
    )
    _write_secret(
        etc / "slurmdbd.conf",
        f"""\
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
DbdHost=localhost
DbdPort={slurmdbd_port}
SlurmUser={getpass.getuser()}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass={password}
PidFile={paths.pid_file("slurmdbd")}
LogFile={paths.log("slurmdbd")}
""",
    )
    with paths.slurm_conf.open("a", encoding="utf-8") as conf:
        conf.write(
            "AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost=localhost\nAccountingStoragePort={slurmdbd_port}\n"
            f"AccountingStoragePass={paths.munge_socket}\n"
        )


def start_database(paths: Paths, environment: dict[str, str]) -> None:
    """Start MariaDB in the background; its pid file appears when it is ready."""
    configuration = f"--defaults-file={paths.slurm_conf.parent / 'mariadb.cnf'}"
    with paths.log("mariadbd").open("ab") as log:
        if not (paths.root / "database").exists():
            install = ["mariadb-install-db", configuration, "--skip-test-db"]
            subprocess.run(install, stdout=log, stderr=log, env=environment, check=True)
        server = ["setsid", "--fork", "mariadbd", configuration]
        subprocess.run(server, stdout=log, stderr=log, env=environment, check=True)


def _write_secret(path: Path, text: str) -> None:
    """A file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
