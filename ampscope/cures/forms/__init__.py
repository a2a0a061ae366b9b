"""How each form of a cure is written: one function a form, from a statement to what changes in it."""
