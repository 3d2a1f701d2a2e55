"""Stands in for lm_eval."""

print("ran lm_eval")
