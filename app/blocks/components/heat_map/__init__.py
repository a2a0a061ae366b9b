"""A heat map whose cells can be picked."""
