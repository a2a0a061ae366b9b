"""How each form of a call is told: what a replay did, the advice, and its code."""
