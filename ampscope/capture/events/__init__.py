"""Describes an optimizer step's events as plain data, with the protocol of those who are told of them."""
