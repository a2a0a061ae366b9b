"""Puts hooks around a training loop's own calls; each call goes on to those who listen."""
