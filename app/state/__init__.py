"""What the reader has chosen, kept in the address and the session."""
