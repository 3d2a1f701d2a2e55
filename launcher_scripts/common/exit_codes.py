"""Exit codes of an evaluation; read by Pythons that are too old for the rest."""

# Of a verdict that was reached.
VERDICTS = {0: "GO", 1: "NO-GO", 2: "INCONCLUSIVE"}
VERDICT_FILE = "verdict.json"
# Of what could not be done, so that nobody takes it for a verdict.
ERROR = 3
