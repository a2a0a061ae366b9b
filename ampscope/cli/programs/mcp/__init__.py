"""A server of the Model Context Protocol, by which an assistant in an editor asks about runs. It only reads."""
