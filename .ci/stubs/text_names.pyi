# The module as it lies in the folder of a text model.
from launcher_scripts.contract.text_names import *  # noqa: F403
