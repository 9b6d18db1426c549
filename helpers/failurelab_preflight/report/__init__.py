"""What preflight says: the answer for a screen, as a sheet and as a whole, in English and in Chinese."""
