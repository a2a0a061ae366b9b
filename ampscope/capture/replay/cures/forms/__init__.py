"""Other forms of one call of the user's code, which a counterfactual replay puts in its place."""
