"""The kernel checks of weights in bytes at real sizes, on the device."""

from __future__ import annotations

import pytest

from tests.kernels.quantized_checks import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
