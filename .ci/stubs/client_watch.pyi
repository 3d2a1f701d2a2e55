# The module as it lies in the folder of a text model.
from launcher_scripts.backends.client_watch import *  # noqa: F403
