"""What preflight says: the answer for a screen, as JSON and JUnit XML, and repairs as diffs of the script."""
