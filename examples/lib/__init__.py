"""What the example programs share. Nothing here is a program of its own."""
