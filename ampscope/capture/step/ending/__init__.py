"""How a step ends: with or without a scaler, well or badly, and what is made of a bad one."""
