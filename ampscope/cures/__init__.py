"""Other forms of a failing call: when they apply, what is called instead, how they are told and written."""
