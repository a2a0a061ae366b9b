"""One optimizer step after another: what belongs to it, when it ends, whether it went wrong."""
