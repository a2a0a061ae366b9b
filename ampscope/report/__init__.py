"""Views of the results: text for a terminal, JSON, figures, HTML, and scripts to send on."""
