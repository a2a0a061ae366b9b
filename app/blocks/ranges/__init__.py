"""What the Ranges page is made of: the heat map of all modules, and one place close up."""
