"""The tables of README.md and docs/measured.md, by subject."""
