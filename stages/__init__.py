"""The phases of a deployment, in the order in which they run."""

from stages.deploy import Deploy, Gateway
from stages.evaluate import Evaluate
from stages.export import Export
from stages.stage import Stage
from stages.watch import Watch

STAGES: dict[str, type[Stage]] = {
    "export": Export,
    "deploy": Deploy,
    "gateway": Gateway,
    "evaluate": Evaluate,
    "watch": Watch,
}
