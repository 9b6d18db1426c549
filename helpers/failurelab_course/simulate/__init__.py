"""The simulated node of the labs."""
