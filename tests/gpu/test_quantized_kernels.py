"""The kernel checks of weights in bytes and of four bits at real sizes, on the device."""

from __future__ import annotations

import pytest

from tests.kernels.packed_checks import *  # noqa: F403
from tests.kernels.quantized_checks import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
