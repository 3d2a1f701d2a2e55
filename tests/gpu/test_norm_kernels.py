"""The checks of folded norms at real sizes, on the device."""

from __future__ import annotations

import pytest

from tests.kernels import norm_checks
from tests.kernels.norm_checks import *  # noqa: F403

pytestmark = [*norm_checks.pytestmark, pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
