"""The verdict, its incidents and findings, and what cures them."""
