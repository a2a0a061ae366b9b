"""Adds habits to the browser on every page: fold the side bar, give the keyboard back, draw a lost page again."""
