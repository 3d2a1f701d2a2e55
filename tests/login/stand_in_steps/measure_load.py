"""Stands in for the load test."""

print("measured the load")
