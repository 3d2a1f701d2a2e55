"""Stands in for the speed sweep."""

print("measured the speed")
