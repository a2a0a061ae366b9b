"""How large values get, how close to the ends of their dtypes, and where that is going."""
