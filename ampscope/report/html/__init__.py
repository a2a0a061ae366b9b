"""Results as HTML that needs no program to be read: for the report, for Jupyter, and inside the app's pages.

Every function gives a piece of HTML in which all names of the trace are escaped; `sheet` styles its classes.
"""
