"""Stands in for the writing of the model repository."""

from pathlib import Path

print("writing the repository")
with Path("ran").open("a") as ran:
    ran.write("write_model_repository\n")
