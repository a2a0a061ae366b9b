"""The audit of a healthy step: what each op of it loses by the dtype in which it computes."""
