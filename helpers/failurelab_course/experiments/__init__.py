"""What runs in any stack: models, the task, trainers, devices, and what a run measured."""
