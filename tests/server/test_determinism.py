"""The same prompt gives the same tokens, however it is asked and however the model is divided."""

from __future__ import annotations

import pytest

from tests.server.determinism_table import CHECKPOINTS, ROWS, counts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.parts[-2])
@pytest.mark.usefixtures("shared_dir")
def test_every_row_has_the_same_tokens_in_every_way(checkpoint) -> None:
    for parallelism, cells in counts(checkpoint).items():
        assert set(cells.values()) == {ROWS}, (parallelism, cells)
