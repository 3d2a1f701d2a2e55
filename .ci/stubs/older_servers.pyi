# The module as it lies in the folder of a text model.
from launcher_scripts.backends.older_servers import *  # noqa: F403
