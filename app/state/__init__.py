"""The pages, and what they hand on to each other in the address and the session."""
