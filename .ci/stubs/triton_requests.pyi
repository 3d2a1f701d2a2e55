# The module as it lies in the folder of a text model.
from launcher_scripts.backends.triton_requests import *  # noqa: F403
