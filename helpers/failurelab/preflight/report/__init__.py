"""What preflight says: the answer for a screen, as JSON and for an issue, and repairs as diffs of the script."""
