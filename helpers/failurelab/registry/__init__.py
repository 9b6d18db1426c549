"""One file per failure."""
