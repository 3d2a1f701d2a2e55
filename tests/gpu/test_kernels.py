"""The kernel checks at real sizes, on the device."""

from __future__ import annotations

import pytest

from tests.kernels.attention_checks import *  # noqa: F403
from tests.kernels.beam_checks import *  # noqa: F403
from tests.kernels.expert_checks import *  # noqa: F403
from tests.kernels.kernel_checks import *  # noqa: F403
from tests.kernels.latent_checks import *  # noqa: F403
from tests.kernels.lora_checks import *  # noqa: F403
from tests.kernels.prompt_checks import *  # noqa: F403
from tests.kernels.recurrence_checks import *  # noqa: F403
from tests.kernels.sampling_checks import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
