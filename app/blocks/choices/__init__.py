"""Select boxes whose choice lives in the page's address, so that a link shows what its sender saw."""
