"""The gated activation of OpenAI's gpt-oss: x * sigmoid(SLOPE * x) * (1 + gate), where x is at most
CLAMP and the gate between -CLAMP and CLAMP."""

SLOPE = 1.702
CLAMP = 7.0
