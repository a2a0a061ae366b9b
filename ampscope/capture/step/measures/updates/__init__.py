"""Compares what an optimizer means to write into half precision with what arrives there."""
