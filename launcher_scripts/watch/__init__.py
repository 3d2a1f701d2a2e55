"""Watch a training: find its checkpoints, evaluate each one, and judge the series."""
