"""Which models decode by fused steps, and how ranks agree on the largest logit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import Communicator, unsupported_reason
from launcher_scripts.engine.model.decode_step import unsupported_reasons
from launcher_scripts.kernels.reference import largest_of_ranks
from tests.engine.small_models import engine_for, random_tensors, small_config


def layer_with(**parts):
    """The weights of a layer whose one sublayer has these adapters."""
    return SimpleNamespace(sublayers=[SimpleNamespace(**{"adapter": None, **parts})])


def test_what_keeps_a_model_from_fused_steps():
    config = small_config()
    assert unsupported_reasons(config, [layer_with()]) == []
    adapted = [layer_with(), layer_with(adapter=object())]
    assert unsupported_reasons(config, adapted) == ["adapters work inside the layers"]
    post = small_config(norm_placement="post")
    assert unsupported_reasons(post, []) == ["norms follow the branches or the sums"]
    odd = SimpleNamespace(norm_placement="pre", head_size=7)
    assert unsupported_reasons(odd, []) == ["heads have an odd number of features"]


@pytest.mark.parametrize(("placement", "said"), [("pre", False), ("post", True)])
def test_a_model_that_takes_the_general_path_says_so(capsys, placement, said):
    config = small_config(norm_placement=placement)
    engine_for(config, random_tensors(config)).close()
    assert ("take the general path: norms follow" in capsys.readouterr().out) == said


class TwoRanks(Communicator):
    """This rank's values, and another's that come after."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__(Parallelism(2), 0)
        self.other = other

    def tp_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, self.other])


def test_the_lowest_id_of_equal_logits_wins():
    infinity = torch.inf
    mine = torch.tensor([1.0, 5.0, 2.0, -infinity])
    other = torch.tensor([[3.0, 5.0, 1.0, 0.0], [60.0, 61.0, 62.0, 16777215.0]])
    ids = largest_of_ranks(mine, torch.tensor([7, 8, 9, 0]), TwoRanks(other))
    assert ids.tolist() == [60, 8, 9, 16777215]
    assert ids.dtype == torch.int64


def test_ranks_that_cannot_share_memory():
    cuda = torch.device("cuda", 0)
    assert unsupported_reason([("a", torch.device("cpu"))]) == "the ranks are not on CUDA devices"
    assert unsupported_reason([("a", cuda), ("b", cuda)]) == "the ranks are on different nodes"
    assert unsupported_reason([("a", cuda), ("a", cuda)]) is None
