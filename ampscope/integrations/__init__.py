"""One line in a training framework; each framework's module is imported by those alone who use it."""
