"""The exercises: a broken script to repair, its proof in three states, and the checker that measures it."""
