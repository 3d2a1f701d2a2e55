"""The life of jobs, seen from their folders: list, status, logs, wait, stop, cancel."""
