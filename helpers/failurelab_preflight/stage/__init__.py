"""What is changed for the time of a run: models, arguments, rows, ranks, trainers, and what a script would start."""
