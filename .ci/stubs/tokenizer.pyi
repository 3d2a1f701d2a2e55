# The module as it lies in the folder of a text model.
from launcher_scripts.common.tokenizer import *  # noqa: F403
