"""Stands in for the comparison with the original."""

print("compared with the original")
