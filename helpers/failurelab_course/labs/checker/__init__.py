"""What measures a lab's script from outside: it runs in the era's Python."""
