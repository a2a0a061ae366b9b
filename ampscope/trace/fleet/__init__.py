"""The runs of a fleet read together: found below folders, and each table of all of them as one."""
