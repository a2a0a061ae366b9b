"""Runs on offer, the run on screen, and results of analysis on it, each computed once and kept."""
