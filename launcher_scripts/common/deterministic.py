"""What a model whose tokens do not depend on other requests cannot have."""

from __future__ import annotations

from launcher_scripts.common.errors import Problems


def check_deterministic(
    problems: Problems, deterministic: bool, others: dict[str, bool], where: str
) -> None:
    """Add a problem for each of `others` (by name, whether it is on) beside `deterministic`.

    They compute a row's tokens in other passes than it would take alone.  where: `{}` is a name
    """
    for name, asked in others.items():
        if deterministic and asked:
            problems.add(
                f"a deterministic model cannot have {name}",
                got="both",
                change=f"{where.format('deterministic')} or {where.format(name)}",
            )
