"""Reward functions as people write them: what their text says, and completions made up to ask them with."""
